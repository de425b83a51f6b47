"""Run the step hooks of other packages, which see a step and may change what is named here and nothing else."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from mmtrain.errors import PluginError
from mmtrain.plugins import Plugin, find_plugin
from mmtrain.runtime.training.step_hook import StepContext, StepHook


@dataclass(frozen=True)
class HookRun:
    """What a hook hears when it is made, on each rank."""

    run_dir: Path
    rank: int
    world_size: int
    num_steps: int
    settings: Mapping[str, Any]  # of the recipe, by dotted key


@dataclass(frozen=True)
class StepView:
    """What a hook sees of a step. Nothing in it can be changed."""

    step: int  # from 1
    num_steps: int
    lr: float
    metrics: Mapping[str, Any] = field(default_factory=dict)  # as in metrics.jsonl; empty before the step


class PluginStepHook(Protocol):
    """Work of another package around a training step. Each of the three methods may be missing.

    All ranks run the same hooks in the same order. An exception ends the run, with the name of the plug-in.
    """

    def before_step(self, step: StepView) -> float | None:
        """Run before the step's data is loaded; return another learning rate, the same on all ranks, or None."""
        ...

    def after_step(self, step: StepView) -> Mapping[str, float] | None:
        """Run after the weights were updated; return numbers to log under `extra`, or None. Those of rank 0 count."""
        ...

    def close(self) -> None:
        """Run once, at the end of the run and after an error."""
        ...


class PluginHook(StepHook):
    """Calls one hook of another package, and lets through what hooks may change: the learning rate, and `extra`."""

    def __init__(self, plugin: Plugin, run: HookRun) -> None:
        self._plugin = plugin
        with plugin.errors_named("making the hook"):
            self._hook: Any = plugin.value(run)

    def before_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises PluginError."""
        if not hasattr(self._hook, "before_step"):
            return
        where = f"before_step of step {ctx.step_number}"
        with self._plugin.errors_named(where):
            lr = self._hook.before_step(StepView(ctx.step_number, ctx.num_steps, ctx.lr))
        if lr is None:
            return
        if not is_number(lr) or lr < 0:
            raise PluginError(
                f"{self._plugin}: {where}: returned {lr!r}; allowed: a learning rate of at least 0, or None"
            )
        ctx.lr = float(lr)

    def after_step(self, ctx: StepContext) -> None:
        """See `StepHook`. Raises PluginError."""
        if not hasattr(self._hook, "after_step"):
            return
        where = f"after_step of step {ctx.step_number}"
        with self._plugin.errors_named(where):
            metrics = MappingProxyType(ctx.metrics.to_json())
            extra = self._hook.after_step(StepView(ctx.step_number, ctx.num_steps, ctx.lr, metrics))
        ctx.metrics = replace(ctx.metrics, extra={**ctx.metrics.extra, **checked_extra(self._plugin, where, extra)})

    def close(self) -> None:
        """See `StepHook`. Raises PluginError."""
        if hasattr(self._hook, "close"):
            with self._plugin.errors_named("close"):
                self._hook.close()


def find_hooks(names: tuple[str, ...]) -> list[Plugin]:
    """Return the plug-ins that `train.hooks` names. Raises UserError and PluginError."""
    return [find_plugin("hooks", name, "train.hooks") for name in names]


def checked_extra(plugin: Plugin, where: str, extra: Any) -> dict[str, float]:
    """Return numbers by name, as a plug-in returned them; nothing for None. Raises PluginError for anything else."""
    if extra is None:
        return {}
    if not isinstance(extra, Mapping) or not all(isinstance(n, str) and is_number(v) for n, v in extra.items()):
        raise PluginError(f"{plugin}: {where}: returned {extra!r}; allowed: finite numbers by name, or None")
    return {name: float(value) for name, value in extra.items()}


def is_number(value: object) -> bool:
    """Return whether a value is a finite number and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
