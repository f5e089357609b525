"""Training: recipes, the loop that follows them in one process or many, and checkpoints to resume from."""

from deepsquare.training.distributed import DistributedContext, init_distributed
from deepsquare.training.loop import Batches, DivergedError, Evaluation, History, StoppedError, fit
from deepsquare.training.recipe import CifarRecipe, ImageNetRecipe, LoaderConfig, Recipe, TrainerConfig
from deepsquare.training.trainer import Trainer, evaluate

__all__ = [
    "Batches",
    "CifarRecipe",
    "DistributedContext",
    "DivergedError",
    "Evaluation",
    "History",
    "ImageNetRecipe",
    "LoaderConfig",
    "Recipe",
    "StoppedError",
    "Trainer",
    "TrainerConfig",
    "evaluate",
    "fit",
    "init_distributed",
]
