"""A run that takes seconds: its recipe, and its options in Python and on the command line."""

from deepsquare.training import ImageNetRecipe, LoaderConfig, TrainerConfig

RECIPE = ImageNetRecipe(
    epochs=2, batch_size=12, lr=0.02, warmup=1.0, model="shufflenet_v2_x0_5", spec="pooling", dropout=0.2,
    size=32, eval_size=32, eval_resize=36,
)  # fmt: skip
CONFIG = TrainerConfig(loading=LoaderConfig(pipeline="torchvision"))
SMALL = ["--size", "32", "--eval-size", "32", "--eval-resize", "36", "--pipeline", "torchvision", "--device", "cpu"]
