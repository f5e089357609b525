"""Training: a recipe, the loop that follows it, on one process or many, and checkpoints to go on from."""

from deepsquare.training.distributed import DistributedContext, init_distributed
from deepsquare.training.loop import Batches, DivergedError, Evaluation, History, StoppedError, evaluate, fit
from deepsquare.training.recipe import CifarRecipe, ImageNetRecipe, Recipe
from deepsquare.training.trainer import Engine, Trainer

__all__ = [
    "Batches",
    "CifarRecipe",
    "DistributedContext",
    "DivergedError",
    "Engine",
    "Evaluation",
    "History",
    "ImageNetRecipe",
    "Recipe",
    "StoppedError",
    "Trainer",
    "evaluate",
    "fit",
    "init_distributed",
]  # fmt: skip
