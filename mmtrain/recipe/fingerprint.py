"""A recipe written out in full, and the fingerprint that ties a plan to it."""

import hashlib
import json
from pathlib import Path

from mmtrain.recipe import strict_yaml as yaml
from mmtrain.recipe.schema import Recipe

_PLANNED_DATA = {
    *("sources", "tokenizer", "seq_len", "max_sample_tokens", "max_images", "image", "video", "audio"),
    *("limits", "window", "grouping", "budgets", "long_tokens"),
}
_PLANNED_TRAIN = {"global_batch", "precision", "freeze"}


def dump_recipe(recipe: Recipe) -> str:
    """Write every setting as YAML. A loaded recipe (its paths are absolute) loads back equal, from anywhere."""
    return yaml.dump_yaml(recipe.model_dump(mode="json"))


def recipe_fingerprint(recipe: Recipe) -> str:
    """Fingerprint what a plan depends on: model, data that shapes the batches, parallelism, cluster, batch, precision.

    Learning rates, seeds, steps, checkpoints and folders of output leave it unchanged, so they do not void a plan. Of
    files it covers the names, not where they lie: a plan made on a laptop is taken on a cluster.
    """
    updates = {unit: {"preset", "lr_scale", "weight_decay"} for unit in type(recipe.model).model_fields}
    settings = {
        "model": recipe.model.model_dump(exclude=updates),
        "data": recipe.data.model_dump(include=_PLANNED_DATA),
        "parallel": recipe.parallel.model_dump(),
        "cluster": recipe.cluster.model_dump(),
        "train": recipe.train.model_dump(include=_PLANNED_TRAIN),
    }
    canonical = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=_name)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _name(path: Path) -> str:
    return path.name
