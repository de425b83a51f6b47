"""From a recipe's `train.loggers` to the trackers that a run feeds."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.errors import UserError
from mmtrain.plugins import find_plugin
from mmtrain.report.trackers.feed import Summarize, TrackerFeeds
from mmtrain.report.trackers.mlflow_tracker import MlflowTracker
from mmtrain.report.trackers.tensorboard_tracker import TensorBoardTracker
from mmtrain.report.trackers.tracker import TrackedRun, Tracker
from mmtrain.report.trackers.trackio_tracker import TrackioTracker
from mmtrain.report.trackers.wandb_tracker import WandbTracker


@dataclass(frozen=True)
class _Known:
    """A tracker that mmtrain brings."""

    open: Callable[[], Tracker]
    package: str  # that it imports
    extra: str  # of mmtrain, that installs it


TRACKERS: Mapping[str, _Known] = {
    "tensorboard": _Known(TensorBoardTracker, "tensorboard", "train"),
    "wandb": _Known(WandbTracker, "wandb", "wandb"),
    "mlflow": _Known(MlflowTracker, "mlflow", "mlflow"),
    "trackio": _Known(TrackioTracker, "trackio", "trackio"),
}


def require_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker of `train.loggers` whose package is not installed here, or that nobody knows."""
    for name in names:
        known = TRACKERS.get(name)
        if known is None:
            find_plugin("loggers", name, "train.loggers")
            continue
        if importlib.util.find_spec(known.package) is None:
            raise UserError(
                f"train.loggers: {name} needs the `{known.package}` package, which is not installed here: pip install "
                f"'mmtrain[{known.extra}]', or leave {name} out"
            )


def open_trackers(
    names: Sequence[str], run: TrackedRun | None, notify: Callable[[str], None], summarize: Summarize
) -> TrackerFeeds:
    """Return what feeds the trackers; `run` is None on ranks that log nothing. Nothing is imported or opened yet."""
    return TrackerFeeds(run, {name: _opener(name) for name in names}, notify, summarize)


def _opener(name: str) -> Callable[[], Tracker]:
    if name in TRACKERS:
        return TRACKERS[name].open
    plugin = find_plugin("loggers", name, "train.loggers")

    def open_plugin() -> Tracker:
        tracker: Tracker = plugin.value()
        return tracker

    return open_plugin
