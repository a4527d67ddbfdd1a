"""Recipes: the paper's training configurations, each with a softmax twin and a tiny form (``sigattn recipes``).

>>> find_recipe("vit-mae-tiny").training.max_steps
800
"""

from sigattn.recipes import language, speech, vision
from sigattn.recipes.datasets import load_dataset, load_held_out
from sigattn.recipes.recipe import DataSource, Recipe
from sigattn.validation import SettingsError

__all__ = ["RECIPES", "DataSource", "Recipe", "find_recipe", "load_dataset", "load_held_out"]

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in vision.RECIPES + speech.RECIPES + language.RECIPES}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name, or raise SettingsError; NAME-tiny, NAME-softmax, NAME-tiny-softmax are variants."""
    base, _, form = name.rpartition("-")
    if form in ("tiny", "softmax"):
        recipe = find_recipe(base)
        return recipe.tiny() if form == "tiny" else recipe.softmax()
    if name not in RECIPES:
        raise SettingsError(f"no recipe is called {name!r}; sigattn recipes lists them: {', '.join(RECIPES)}")
    return RECIPES[name]
