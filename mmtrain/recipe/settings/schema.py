"""The recipe: every setting that a user may write, with its unit, range and default.

A recipe is a YAML file; `mmtrain.recipe.load_recipe` turns it into the frozen `Recipe` below. Field names are the
dotted paths in error messages (`data.seq_len`) and in `--set`. Each section has a module: `data_settings`,
`parallel_settings` (with the cluster), `train_settings` and `model_settings`; each kind of unit has one too.
"""

from pathlib import Path

from pydantic import Field

from mmtrain.recipe.settings.base import NOTHING, Section, setting
from mmtrain.recipe.settings.data_settings import DataSettings
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
