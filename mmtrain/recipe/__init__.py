"""Recipes: what a user writes, checked and resolved.

`load_recipe` reads a YAML file strictly, with `extends`, `${env:NAME}` and `--set` overrides, and reports all problems
at once, each with its path, its line and the allowed values. The settings are pydantic models: `schema` is the whole
recipe, and each of its sections has a module.
"""

from mmtrain.recipe.checks.cross_checks import is_runnable, require_runnable
from mmtrain.recipe.loading.json_schema import editor_schema
from mmtrain.recipe.loading.recipe_loader import (
    LoadedRecipe,
    WrittenRecipe,
    dump_recipe,
    load_recipe,
    read_recipe,
    recipe_fingerprint,
)
from mmtrain.recipe.settings.schema import Recipe

__all__ = [
    "LoadedRecipe",
    "Recipe",
    "WrittenRecipe",
    "dump_recipe",
    "editor_schema",
    "is_runnable",
    "load_recipe",
    "read_recipe",
    "recipe_fingerprint",
    "require_runnable",
]
