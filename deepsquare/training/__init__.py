"""Training: a recipe, the loop that follows it, and checkpoints to go on from."""

from deepsquare.training.loop import Batches, DivergedError, History, evaluate, fit
from deepsquare.training.recipe import Recipe

__all__ = ["Batches", "DivergedError", "History", "Recipe", "evaluate", "fit"]
