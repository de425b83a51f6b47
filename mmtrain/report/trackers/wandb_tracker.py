"""Weights & Biases: offline in the run's folder, or online where the machine has a login."""

import netrc
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mmtrain.report.trackers.tracker import RunEnd, ShownAnswer, TrackedRun

_INIT_TIMEOUT_S = 60
_OFFLINE_PREFIX = "offline-run-"
_PICTURES_FOLDER = "data"  # where pictures of tables wait until they are sent


class WandbTracker:
    """Shows a run in W&B under the run's own id.

    W&B cannot take back what a killed run logged after its last checkpoint. Offline, a start therefore writes the whole
    log again into a new folder of the same id and then removes the folders of earlier starts. Online, W&B keeps what
    it has: a step that it holds is not sent again.
    """

    _data_folder: ClassVar[str | None] = None  # that an earlier run of this process set

    def __init__(self) -> None:
        self._run: Any = None
        self._wandb: Any = None
        self._replaced: list[Path] = []  # folders of earlier starts, which this one replaces

    def start(self, run: TrackedRun) -> int:
        """See `Tracker`."""
        import wandb

        self._wandb = wandb
        mode = wandb_mode(os.environ)
        is_online = mode == "online"
        folder = run.run_dir / "wandb"
        self._replaced = [] if is_online else sorted(folder.glob(f"{_OFFLINE_PREFIX}*-{run.run_id}"))
        folder.mkdir(parents=True, exist_ok=True)
        if not is_online:
            shutil.rmtree(folder / _PICTURES_FOLDER, ignore_errors=True)  # they are all told again
        if os.environ.get("WANDB_DATA_DIR") in (None, WandbTracker._data_folder):  # else in the home folder
            WandbTracker._data_folder = os.environ["WANDB_DATA_DIR"] = str(folder / _PICTURES_FOLDER)
        # Metadata hold the command line, and console output whatever a library prints: both may hold credentials.
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=_INIT_TIMEOUT_S,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=not is_online,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "mmtrain"),
            name=run.name,
            id=run.run_id,
            dir=str(run.run_dir),
            mode=mode,
            config={**run.config, **{f"git/{name}": value for name, value in run.git.items()}},
            resume="allow" if is_online else None,
            settings=settings,
        )
        if mode == "offline":  # two starts in one second share the name of their folder
            self._replaced = [path for path in self._replaced if path != Path(self._run.dir).parent]
        held = self._run.step - 1 if is_online and self._run.resumed else 0
        if held <= 0:
            self._run.log({"recipe": _code(wandb, run.recipe), "plan": _code(wandb, run.plan_text)}, step=0)
            self._run.summary["plan.json"] = run.plan
        return max(held, 0)

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log(dict(scalars), step=step)

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """See `Tracker`."""
        num_pictures = max((len(answer.pictures) for answer in answers), default=0)  # a cell shows one only
        columns = ["question", "expected", "answered", "right"]
        table = self._wandb.Table(columns=columns + [f"picture {number}" for number in range(1, num_pictures + 1)])
        for answer in answers:
            pictures: list[Any] = [self._wandb.Image(str(path)) for path in answer.pictures]
            pictures += [None] * (num_pictures - len(pictures))
            table.add_data(answer.question, answer.expected, answer.answered, answer.is_right, *pictures)
        self._run.log({"answers": table}, step=step)

    def flush(self) -> None:
        """See `Tracker`. Once the new folder holds the whole log, those of earlier starts say nothing more."""
        for folder in self._replaced:
            shutil.rmtree(folder)
        self._replaced = []

    def finish(self, end: RunEnd, summary: Mapping[str, str | float]) -> None:
        """See `Tracker`."""
        self._run.summary.update({f"summary/{name}": value for name, value in summary.items()})
        self._run.finish(exit_code=0 if end == "done" else 1)

    def abandon(self) -> None:
        """See `Tracker`."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=1)


def wandb_mode(env: Mapping[str, str], home: Path | None = None) -> Any:
    """Return `WANDB_MODE` where it is set; else `online` where this machine has a login of W&B, or else `offline`."""
    if mode := env.get("WANDB_MODE"):
        return mode
    if env.get("WANDB_API_KEY"):
        return "online"
    path = Path(env.get("NETRC") or (home or Path.home()) / ".netrc")
    host = env.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].strip("/")
    try:
        return "online" if netrc.netrc(str(path)).authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


def _code(wandb: Any, text: str) -> Any:
    import html

    return wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
