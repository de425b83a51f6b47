"""The step record: what one rank did in one step, and when. Timelines, metrics and straggler detection read it."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mmtrain.program.ir.actions import Action, Collective, Dispatch, Recv, Send, Step
from mmtrain.program.ir.graph import Edge


class ActionRecord(NamedTuple):
    """An action that ran from `start_s` to `end_s`; for the first `wait_s` of that time it waited.

    A forward or backward waits for messages, the first forward of a chunk also for the gathering of its parameters, and
    the optimizer step for the reductions that were started before it.
    """

    action: Action
    start_s: float
    end_s: float
    wait_s: float

    @property
    def busy_s(self) -> float:
        """Seconds that the action itself took."""
        return self.end_s - self.start_s - self.wait_s


class MessageRecord(NamedTuple):
    """A message with at least one row, from when this rank posted its end to when it knew that it was complete.

    `wait_s` is how long the rank stood still for it. When the bytes came within that time is not known.
    """

    message: Send | Recv
    posted_s: float
    done_s: float
    wait_s: float
    nbytes: int


@dataclass(frozen=True)
class EdgeTraffic:
    """The traffic of an edge: bytes sent, and seconds that ranks stood still for it at either end."""

    nbytes: int = 0
    wait_s: float = 0.0

    def __add__(self, other: "EdgeTraffic") -> "EdgeTraffic":
        return EdgeTraffic(self.nbytes + other.nbytes, self.wait_s + other.wait_s)


@dataclass(frozen=True)
class StepRecord:
    """One rank's step, from `start_s` to `end_s` on a clock of its own, in seconds."""

    start_s: float
    end_s: float
    actions: tuple[ActionRecord, ...]
    messages: tuple[MessageRecord, ...]

    def seconds_by_kind(self) -> dict[str, float]:
        """Return how long the rank spent in `compute` (with the optimizer), `communication` and `wait`.

        It waits for messages, and for reductions and gathers that its own compute did not hide.
        """
        last_end_s = self.actions[-1].end_s if self.actions else self.start_s
        drained_s = sum(m.wait_s for m in self.messages if m.done_s > last_end_s)  # behind the last action
        split = {"compute": 0.0, "communication": 0.0, "wait": drained_s}
        for record in self.actions:
            split["wait"] += record.wait_s
            moves_data = isinstance(record.action, Send | Recv | Collective) and not isinstance(record.action, Step)
            split["communication" if moves_data else "compute"] += record.busy_s
        return split

    def dispatch_s(self) -> float:
        """Return the seconds in which the rank dispatched; it waits for the other ranks in them."""
        return sum(record.end_s - record.start_s for record in self.actions if isinstance(record.action, Dispatch))

    def traffic_by_edge(self) -> Mapping[Edge, EdgeTraffic]:
        """Return bytes sent and seconds waited, by edge."""
        traffic: defaultdict[Edge, EdgeTraffic] = defaultdict(EdgeTraffic)
        for record in self.messages:
            nbytes = record.nbytes if isinstance(record.message, Send) else 0
            traffic[record.message.edge] += EdgeTraffic(nbytes, record.wait_s)
        return traffic

    def shifted(self, by_s: float) -> "StepRecord":
        """Return the same record on a clock that reads `by_s` seconds more."""
        return StepRecord(
            self.start_s + by_s,
            self.end_s + by_s,
            tuple(d._replace(start_s=d.start_s + by_s, end_s=d.end_s + by_s) for d in self.actions),
            tuple(_shifted(self.messages, by_s)),
        )


EMPTY_STEP_RECORD = StepRecord(0.0, 0.0, (), ())


def _shifted(messages: tuple[MessageRecord, ...], by_s: float) -> Iterator[MessageRecord]:
    return (m._replace(posted_s=m.posted_s + by_s, done_s=m.done_s + by_s) for m in messages)
