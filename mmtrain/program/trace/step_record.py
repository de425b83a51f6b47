"""What one rank did in one step, and when: what timelines, metrics and the search for slow ranks read."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, GatherParams, Recv, ReduceGrads, ReduceShared, Send, Share
from mmtrain.program.ir.graph import Edge


class ActionRecord(NamedTuple):
    """An action that ran from `start_s` to `end_s`, the first `wait_s` of which it waited for messages."""

    action: Action
    start_s: float
    end_s: float
    wait_s: float

    @property
    def busy_s(self) -> float:
        """Seconds that the action itself took."""
        return self.end_s - self.start_s - self.wait_s


class MessageRecord(NamedTuple):
    """A message with at least one row, from when this rank posted its end to when it knew that it had come.

    `wait_s` is how long the rank stood still for it. Nothing tells when the bytes came within that time.
    """

    message: Send | Recv
    posted_s: float
    done_s: float
    wait_s: float
    nbytes: int


@dataclass(frozen=True)
class EdgeTraffic:
    """What went over an edge: bytes sent, and seconds that ranks stood still for it at either end."""

    nbytes: int = 0
    wait_s: float = 0.0

    def __add__(self, other: "EdgeTraffic") -> "EdgeTraffic":
        return EdgeTraffic(self.nbytes + other.nbytes, self.wait_s + other.wait_s)


@dataclass(frozen=True)
class StepRecord:
    """One rank's step, from `start_s` to `end_s` of a clock of its own, in seconds."""

    start_s: float
    end_s: float
    actions: tuple[ActionRecord, ...]
    messages: tuple[MessageRecord, ...]

    def seconds(self) -> dict[str, float]:
        """Where the step's time went: `compute` (the optimizer's included), `communication`, `wait` for messages."""
        split = {"compute": 0.0, "communication": 0.0, "wait": sum(m.wait_s for m in self.messages)}
        for done in self.actions:
            moves = isinstance(done.action, Send | Recv | Share | ReduceGrads | ReduceShared | GatherParams)
            split["communication" if moves else "compute"] += done.busy_s
        return split

    def traffic_by_edge(self) -> Mapping[Edge, EdgeTraffic]:
        """Bytes sent and seconds waited, by edge."""
        found: defaultdict[Edge, EdgeTraffic] = defaultdict(EdgeTraffic)
        for m in self.messages:
            found[m.message.edge] += EdgeTraffic(m.nbytes if isinstance(m.message, Send) else 0, m.wait_s)
        return found

    def shifted(self, by_s: float) -> "StepRecord":
        """The same on a clock that reads `by_s` seconds more."""
        return StepRecord(
            self.start_s + by_s,
            self.end_s + by_s,
            tuple(d._replace(start_s=d.start_s + by_s, end_s=d.end_s + by_s) for d in self.actions),
            tuple(_shifted(self.messages, by_s)),
        )


EMPTY_STEP_RECORD = StepRecord(0.0, 0.0, (), ())


def _shifted(moved: tuple[MessageRecord, ...], by_s: float) -> Iterator[MessageRecord]:
    return (m._replace(posted_s=m.posted_s + by_s, done_s=m.done_s + by_s) for m in moved)
