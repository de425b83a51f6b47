"""A recipe written out in full, and the fingerprint that ties a plan to it."""

import hashlib
import json
from pathlib import Path

from mmtrain.recipe.loading import strict_yaml
from mmtrain.recipe.settings.base import select_for_saving
from mmtrain.recipe.settings.schema import Recipe


def dump_recipe(recipe: Recipe) -> str:
    """Write every setting as YAML. A loaded recipe (its paths are absolute) loads back equal from any folder."""
    return strict_yaml.dump_yaml(recipe.model_dump(mode="json"))


def recipe_fingerprint(recipe: Recipe) -> str:
    """Return the SHA-256 of all settings that plans depend on: those that declare the effect `plan`.

    Of files it covers the names, not their folders: a plan made on a laptop is valid on a cluster.
    """
    settings = select_for_saving(recipe, "plan", mode="python")
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_file_name)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _file_name(path: Path) -> str:
    return path.name
