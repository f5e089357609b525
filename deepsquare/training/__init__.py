"""Training: a recipe, the loop that follows it, on one process or many, and checkpoints to go on from."""

from deepsquare.training.distributed import Team, join
from deepsquare.training.loop import Batches, DivergedError, Evaluation, History, StoppedError, evaluate, fit
from deepsquare.training.recipe import CifarRecipe, ImageNetRecipe, Recipe
from deepsquare.training.trainer import Engine, Learner

__all__ = [
    "Batches", "CifarRecipe", "DivergedError", "Engine", "Evaluation", "History", "ImageNetRecipe", "Learner", "Recipe",
    "StoppedError", "Team", "evaluate", "fit", "join",
]  # fmt: skip
