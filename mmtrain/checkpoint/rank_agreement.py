"""The collectives by which the ranks of a job agree while they save or open a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mmtrain.errors import CheckpointError, MmtrainError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank, the number of ranks, and two collectives over small JSON values.

    `gather(value)` gives rank 0 the values of all ranks in order, and None to the others. `broadcast(value)` gives
    every rank the value of rank 0. `broadcast` returns on no rank before rank 0 has called it; `gather` returns on
    rank 0 only after all ranks have called it. So both also order the ranks' work.
    """

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any] | None]
    broadcast: Callable[[Any], Any]

    @classmethod
    def alone(cls) -> "Ranks":
        """Return the ranks of a job with one process."""
        return cls(0, 1, lambda value: [value], lambda value: value)

    def from_zero(self, doing: str, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and return its result, a JSON value, on all ranks.

        If it fails, all ranks raise the same CheckpointError, which says what rank 0 was `doing`. A failure that only
        rank 0 noticed would leave the others waiting in the next collective.
        """
        outcome: dict[str, Any] | None = None
        cause: Exception | None = None
        if self.rank == 0:
            try:
                outcome = {"result": work()}
            except Exception as error:
                outcome, cause = {"error": f"{doing}: {describe(error)}"}, error
        verdict = self.broadcast(outcome)
        if "error" in verdict:
            raise CheckpointError(verdict["error"]) from cause
        result: T = verdict["result"]
        return result


def describe(error: Exception) -> str:
    """Describe an error in one line for other ranks; the line names the error's type if its text may be unclear."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, MmtrainError) else f"{type(error).__name__}: {error}"
