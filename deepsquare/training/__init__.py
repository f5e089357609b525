"""Training: a recipe, the loop that follows it, on one process or many, and checkpoints to go on from."""

from deepsquare.training.learner import Engine, Learner
from deepsquare.training.loop import Batches, DivergedError, Evaluation, History, StoppedError, evaluate, fit
from deepsquare.training.recipe import CifarRecipe, ImageNetRecipe, Recipe
from deepsquare.training.team import Team, join

__all__ = [
    "Batches", "CifarRecipe", "DivergedError", "Engine", "Evaluation", "History", "ImageNetRecipe", "Learner", "Recipe",
    "StoppedError", "Team", "evaluate", "fit", "join",
]  # fmt: skip
