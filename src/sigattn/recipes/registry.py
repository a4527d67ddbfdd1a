"""Registry of all recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from sigattn.recipes import language, speech, vision
from sigattn.recipes.recipe import Recipe


class RecipeError(Exception):
    """Error of a name that no recipe has; the message is one line."""


RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__.replace("_", "-"): make for make in (*vision.RECIPES, *speech.RECIPES, *language.RECIPES)
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of a name; NAME-tiny, NAME-softmax and NAME-tiny-softmax are its variants.

    Raises:
        RecipeError: if there is no such recipe.
    """
    base, forms = name, []
    while base.rpartition("-")[2] in ("tiny", "softmax"):
        base, _, form = base.rpartition("-")
        forms.append(form)
    if base not in RECIPES:
        raise RecipeError(f"no recipe is called {name!r}; sigattn recipes lists them: {', '.join(RECIPES)}")
    recipe = RECIPES[base]()
    for form in reversed(forms):
        recipe = recipe.tiny() if form == "tiny" else recipe.softmax()
    return recipe
