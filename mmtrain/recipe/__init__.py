"""Recipes: what a user writes, checked and resolved.

`load` reads a YAML file strictly, with `extends`, `${env:NAME}` and `--set` overrides, and reports every problem at
once with path, line and what is allowed. The settings themselves are the pydantic models in `schema`, and in `model`
those of units.
"""

from mmtrain.recipe.fingerprint import dump, sha256
from mmtrain.recipe.json_schema import editor_schema
from mmtrain.recipe.loader import Loaded, load
from mmtrain.recipe.only_planned import is_runnable, require_runnable
from mmtrain.recipe.schema import Recipe

__all__ = ["Loaded", "Recipe", "dump", "editor_schema", "is_runnable", "load", "require_runnable", "sha256"]
