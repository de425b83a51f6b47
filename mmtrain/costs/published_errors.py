"""How far off predictions of published runs are that no constant was fitted to, for runs like the one to be planned.

`published_errors.json` holds one ratio for each such run, priced with the kernels of its software (`costs.framework`):
with mmtrain's, the difference of two programs would count as an error of the model.
`python -m scripts.bench_known --write` makes it; plans, README and docs state what it holds.
"""

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from mmtrain.costs.hardware import Hardware

LayoutKind = Literal["pipeline", "cp", "tp x dp", "FSDP"]
ERRORS_FILE = "published_errors.json"
MIN_RUNS = 3  # of a group whose errors are stated; fewer say nothing about the next run
HIGH_SHARE = 0.9  # of the runs, whose errors the second figure bounds
_RUNS_FOR_HIGH_SHARE = 10  # with fewer, nine of ten are all but the worst or all of them, so the worst is stated


@dataclass(frozen=True)
class RunKind:
    """What makes one run like another: what it runs on, how its layers are laid out, and what its model reads."""

    hardware: str  # a preset's name
    layout: LayoutKind
    is_multimodal: bool  # it has an encoder or a generator
    has_experts: bool = False  # its LLM is a mixture of experts

    def is_on(self, gpu: str) -> bool:
        """Whether it runs on this GPU, in nodes of any kind: `a100-80g-4x200` names nodes of `a100-80g`."""
        return re.sub(r"-\d+x\d+$", "", self.hardware) == gpu


def layout_kind(*, is_sharded: bool, pp: int, cp: int) -> LayoutKind:
    """Return the kind of a layout from how the LLM is laid out: layers of a pipeline count most."""
    if is_sharded:
        return "FSDP"
    if pp > 1:
        return "pipeline"
    return "cp" if cp > 1 else "tp x dp"


def error_of(ratio: float) -> float:
    """Return how far two durations lie apart, as a share of the smaller, from their ratio."""
    return max(ratio, 1 / ratio) - 1


def bound_of_share(errors: Sequence[float], share: float) -> float:
    """Return the least of the errors that at least this share of them does not exceed."""
    return sorted(errors)[math.ceil(share * len(errors)) - 1]


class PublishedError(BaseModel):
    """One published run that no constant was fitted to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    hardware: str  # a preset's name
    layout: LayoutKind
    is_multimodal: bool
    has_experts: bool = False
    ratio: float = Field(gt=0, allow_inf_nan=False)  # predicted over published seconds of a step


class PublishedErrors(BaseModel):
    """All of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    runs: tuple[PublishedError, ...]

    def text(self, kind: RunKind) -> str:
        """Say how far off predictions of runs like this one were, or that there is no such run.

        Runs are alike on one GPU, with one kind of layout, and both multimodal or both of text alone. If fewer than
        `MIN_RUNS` are, runs of other layouts stand in for them, and for multimodal ones runs of text. Those of mixtures
        of experts are so few that all of them stand for any.
        """
        if kind.has_experts:
            return f"{self.of_mixtures()}; of dense models, {self.text(replace(kind, has_experts=False))}"
        on_gpu = [run for run in self.runs if kind.is_on(run.hardware) and not run.has_experts]
        same_input = [run for run in on_gpu if run.is_multimodal == kind.is_multimodal]
        alike = [run for run in same_input if run.layout == kind.layout]
        if len(alike) >= MIN_RUNS:
            return f"{_errors_text(alike)} of {len(alike)} published runs like this one with their kernels"
        if len(same_input) >= MIN_RUNS:
            count = len(alike) or "none"
            on_this = f"{len(same_input)} published runs on this GPU with their kernels"
            return f"{_errors_text(same_input)} of {on_this}, {count} of this layout"
        if not on_gpu:
            return "no published run on this GPU was compared"
        if not kind.is_multimodal:
            return f"only {len(on_gpu)} published runs on this GPU were compared"
        text_only = self.text(replace(kind, is_multimodal=False))
        return f"{len(same_input) or 'no'} multimodal runs on this GPU were compared; of text, {text_only}"

    def of_mixtures(self) -> str:
        """Say how far off predictions of mixtures of experts were, on any GPU and in any layout."""
        mixtures = [run for run in self.runs if run.has_experts]
        if not mixtures:
            return "no published run of a mixture of experts was compared"
        return f"{_errors_text(mixtures)} of {len(mixtures)} published runs of mixtures of experts"


def expected_error(hardware: Hardware, layout: LayoutKind, *, is_multimodal: bool, has_experts: bool = False) -> str:
    """Say how far measured steps lie from predictions for such a run, from published runs or from our own."""
    if hardware.own_run_ratios is not None:
        least, largest = hardware.own_run_ratios
        return f"our own runs took {least:g} to {largest:g} times as long"
    return published_errors().text(RunKind(hardware.name, layout, is_multimodal, has_experts))


def _errors_text(runs: Sequence[PublishedError]) -> str:
    errors = [error_of(run.ratio) for run in runs]
    median = f"within {statistics.median(errors):.0%} in the median"
    if len(errors) < _RUNS_FOR_HIGH_SHARE:
        return f"{median} and {max(errors):.0%} at worst"
    return f"{median} and {bound_of_share(errors, HIGH_SHARE):.0%} in nine of ten"


@cache
def published_errors() -> PublishedErrors:
    """Read the errors that come with the package."""
    return PublishedErrors.model_validate_json((files("mmtrain.costs") / ERRORS_FILE).read_text(encoding="utf-8"))
