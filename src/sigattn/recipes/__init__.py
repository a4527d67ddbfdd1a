"""Recipes: the paper's training configurations, each with a softmax twin and a tiny form (``sigattn recipes``).

``RECIPES`` maps each name to the function that makes the recipe.

>>> find_recipe("vit-mae-tiny").training.max_steps
800
"""

from sigattn.recipes.datasets import load_dataset, load_held_out
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.recipes.registry import RECIPES, RecipeError, find_recipe

__all__ = ["RECIPES", "DataSource", "Recipe", "RecipeError", "find_recipe", "load_dataset", "load_held_out"]
