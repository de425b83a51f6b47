"""The protocol of an experiment tracker, and what it hears of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

RunEnd = str  # "done", or "interrupted": a run that may be resumed


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker hears of a run before its first step. No text in it holds a credential."""

    run_id: str  # stays the same when the run is resumed
    name: str
    run_dir: Path
    first_step: int  # from 1, that this start of the run will log first; a tracker drops it and all later ones
    recipe: str  # YAML, with all defaults
    plan: str  # JSON
    plan_text: str  # the table of `mmtrain plan`
    config: Mapping[str, str | int | float | bool]  # settings by dotted key, versions, hardware, ranks
    git: Mapping[str, str] = field(default_factory=dict)  # commit, branch, changed files; empty outside of git


@dataclass(frozen=True)
class ShownAnswer:
    """One held-out question with the expected and the given answer, and small pictures of its images."""

    question: str
    expected: str
    answered: str
    pictures: tuple[Path, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether the answer is exactly the expected one."""
        return self.answered == self.expected


class Tracker(Protocol):
    """Shows runs somewhere. Only one thread calls it, so that it may wait for disks and networks.

    Any exception counts as a failure: the tracker is closed, and a new one is opened later. A tracker that has failed
    a few times is left alone, and the run goes on.
    """

    def start(self, run: TrackedRun) -> int:
        """Show recipe, plan, config and git state of a run. Continue the tracker's run of that `run_id` if it has one.

        Return the last step that the tracker holds, below `run.first_step`; 0 if it holds none. It hears the later
        ones. What it held from `run.first_step` on must be gone, or be skipped when it comes again.
        """
        ...

    def log_step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Show the numbers of a step, by names like `train/loss`; steps come in order, each once."""
        ...

    def log_answers(self, step: int, answers: Sequence[ShownAnswer]) -> None:
        """Show the answers to held-out questions after a step; called before `log_step` of that step."""
        ...

    def flush(self) -> None:
        """Make durable what was shown so far. Called when there is nothing more to show for now."""
        ...

    def finish(self, end: RunEnd, summary: Mapping[str, str | float]) -> None:
        """Show the summary, and leave the tracker's run. Nothing is called afterwards."""
        ...

    def abandon(self) -> None:
        """Let go of everything after a failure, without waiting."""
        ...
