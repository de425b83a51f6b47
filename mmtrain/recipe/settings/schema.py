"""The recipe: every setting that a user may write, with its unit, range and default.

A recipe is a YAML file; `mmtrain.recipe.load_recipe` turns it into the frozen `Recipe` below. Field names are the
dotted paths in error messages (`data.seq_len`) and in `--set`. Each section has a module: `data_settings`,
`parallel_settings` (with the cluster), `train_settings` and `model_settings`; each kind of unit has one too.
"""

import math
from html import escape
from pathlib import Path

import yaml
from pydantic import Field

from mmtrain.recipe.settings.base import NOTHING, Section, setting
from mmtrain.recipe.settings.data_settings import DataSettings
from mmtrain.recipe.settings.modalities import other_units
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.parallel_settings import ClusterSettings, ParallelSettings
from mmtrain.recipe.settings.train_settings import TrainSettings


class Recipe(Section):
    """One training run: model, data, parallelism, hardware, training."""

    name: str = setting(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", affects=NOTHING, description="Name of the run and of its folder."
    )
    model: ModelSettings
    data: DataSettings
    parallel: ParallelSettings = Field(ParallelSettings())
    cluster: ClusterSettings = Field(ClusterSettings())
    train: TrainSettings
    run_dir: Path | None = setting(
        None,
        affects=NOTHING,
        description="Folder that the run writes to. Default: `runs/<name>` in the current folder.",
    )
    mmtrain: str | None = setting(
        None,
        affects=NOTHING,
        description="Lowest version of mmtrain that reads this recipe as it is meant, such as 0.1.0. An older one "
        "rejects the recipe. Default: none is stated.",
    )

    def _repr_html_(self) -> str:
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        return f"<details><summary>Recipe <b>{escape(self.name)}</b></summary><pre>{escape(text)}</pre></details>"

    @property
    def states_groups(self) -> bool:
        """Whether the recipe alone says how many groups a step has, and how large they are."""
        return isinstance(self.train.global_batch, int) and self.data.seq_len != "auto"

    @property
    def required_multiple(self) -> int:
        """Return what the groups of a step are a multiple of, by replicas and microbatches that the recipe fixes."""
        llm = self.parallel.llm
        fixed = [self.parallel.of(name).dp or 1 for name in other_units(self.model)]
        return math.lcm((llm.dp or 1) * (llm.num_microbatches or 1), *fixed)

    def with_groups(self, num_groups: int, group_tokens: int) -> "Recipe":
        """Return the recipe with this number of groups in a step and this size of groups in place of what it states."""
        data = self.data.model_copy(update={"seq_len": group_tokens})
        train = self.train.model_copy(update={"global_batch": num_groups})
        return self.model_copy(update={"data": data, "train": train})

    def with_steps(self, num_steps: int) -> "Recipe":
        """Return the recipe with the number of steps of its epochs."""
        return self.model_copy(update={"train": self.train.model_copy(update={"steps": num_steps})})
