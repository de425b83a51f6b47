"""How the ranks of a job agree while they save or open a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mmtrain.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank among its peers, and two collectives over small JSON values.

    `gather(value)` gives rank 0 the values of all ranks in order, the others None. `broadcast(value)` gives every
    rank the value of rank 0. Neither returns on any rank before rank 0 has (broadcast) or has been sent (gather)
    the value, so they order the ranks' work as well.
    """

    rank: int
    world_size: int
    gather: Callable[[Any], list[Any] | None]
    broadcast: Callable[[Any], Any]

    @classmethod
    def alone(cls) -> "Ranks":
        """A job of one process."""
        return cls(0, 1, lambda value: [value], lambda value: value)

    def from_zero(self, doing: str, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 and give its result, a JSON value, to all; if it fails, all raise the same
        CheckpointError, which says what rank 0 was `doing`.

        A failure that only rank 0 knew of would leave the others waiting in the next collective for ever.
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
    """One line for a message that travels between ranks; the error's type where its text may not explain itself."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
