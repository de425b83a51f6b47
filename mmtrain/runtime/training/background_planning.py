"""Make a plan beside the training, in a process of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.training.background_call import BackgroundCall, CallOutcome


@dataclass(frozen=True)
class PlanningOutcome:
    """What became of a plan that was made in the background: a plan, or the reason why there is none."""

    plan: Plan | None
    reason: str | None  # why there is none: the planner's error, or how its process failed
    seconds: float = 0.0  # that planning took


class BackgroundPlanning:
    """Calls a function that returns a plan, as `BackgroundCall` does."""

    def __init__(self, make_plan: Callable[[], Plan]) -> None:
        self._call = BackgroundCall(partial(_plan_values, make_plan))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def poll(self) -> PlanningOutcome | None:
        """Return the outcome, or None while the plan is being made."""
        return _as_plan(self._call.poll())

    def wait(self, timeout_s: float | None = None) -> PlanningOutcome | None:
        """Wait for the outcome and return it; None if it does not come in time."""
        return _as_plan(self._call.wait(timeout_s))

    def close(self) -> None:
        """End the child process, whatever it is doing."""
        self._call.close()


def _plan_values(make_plan: Callable[[], Plan]) -> dict[str, Any]:
    return make_plan().model_dump(mode="json")


def _as_plan(outcome: CallOutcome | None) -> PlanningOutcome | None:
    if outcome is None:
        return None
    plan = None if outcome.value is None else Plan.model_validate(outcome.value)
    return PlanningOutcome(plan, outcome.reason, outcome.seconds)
