"""Timelines: what every rank did when, simulated or measured; Chrome trace JSON (opens in Perfetto)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

from mmtrain.program.ir.actions import (
    Action,
    AsyncCollective,
    Backward,
    Compute,
    Dispatch,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.segments import direction

BubbleKind = Literal[
    "dp_gather", "dp_reduce", "pp_warmup", "pp_cooldown", "pp_other", "tp", "tp_layers", "dispatch", "imbalance"
]
BUBBLE_KINDS: tuple[BubbleKind, ...] = (
    "dp_gather",
    "dp_reduce",
    "pp_warmup",
    "pp_cooldown",
    "pp_other",
    "tp",
    "tp_layers",
    "dispatch",
    "imbalance",
)


STREAMS = ("compute", "communication", "data parallel")  # of a rank


class Span(NamedTuple):
    """One action on one rank: from `start_s`, for `duration_s` seconds.

    Forwards, backwards and parts of them run on the rank's compute stream, reductions of gradients and the gathering of
    parameters on its data-parallel stream, everything else on its communication stream. A message is shown on its
    sender. `nbytes` is what the communication moves.
    """

    rank: int
    start_s: float
    duration_s: float
    action: Action
    nbytes: int = 0


class LazySpans(Sequence[Span]):
    """Spans that are made when first read: most simulated steps are needed for their time only."""

    def __init__(self, make: Callable[[], tuple[Span, ...]]) -> None:
        self._make = make

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        return self._made[index]

    def __len__(self) -> int:
        return len(self._made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._made == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def _made(self) -> tuple[Span, ...]:
        return self._make()


class LazyPeaks(Mapping[int, int]):
    """Bytes by rank that are counted when first read: plans are compared by what else counts them."""

    def __init__(self, make: Callable[[], Mapping[int, int]]) -> None:
        self._make = make

    def __getitem__(self, rank: int) -> int:
        return self._made[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    @cached_property
    def _made(self) -> Mapping[int, int]:
        return self._make()


@dataclass(frozen=True)
class Timeline:
    """One step: spans in the order of their start, and what they add up to.

    Only a simulated step knows its critical path: actions in order, each starting when the one before ends, from the
    start of the step to its end.
    """

    spans: Sequence[Span]
    step_time_s: float
    bubbles: Mapping[int, Mapping[BubbleKind, float]]  # rank -> kind -> seconds its compute stream is idle
    peak_memory_bytes: Mapping[int, int]  # rank -> the most bytes of activations alive at once
    simulated: bool
    pipeline_ranks: Mapping[str, int]  # unit -> pp: its stages visit so many pipeline ranks in each model chunk
    critical_path: Sequence[Span] = ()

    def bubble_shares(self) -> dict[BubbleKind, float]:
        """Return the idle time by kind as a share of all rank-seconds of the step."""
        total = self.step_time_s * len(self.bubbles)
        idle = {kind: sum(of_rank[kind] for of_rank in self.bubbles.values()) for kind in BUBBLE_KINDS}
        return {kind: seconds / total if total else 0.0 for kind, seconds in idle.items()}


def chrome_trace(timeline: Timeline, plan_sha256: str) -> dict[str, Any]:
    """Return the timeline as a Chrome trace: `pid` is the global rank, `tid` the number of its stream in `STREAMS`."""
    events: list[dict[str, Any]] = []
    for rank in timeline.bubbles:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for tid, name in enumerate(STREAMS):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}})
    events += [_event(span, timeline.pipeline_ranks) for span in timeline.spans]
    other = {
        "simulated": timeline.simulated,
        "step_time_us": timeline.step_time_s * 1e6,
        "plan_sha256": plan_sha256,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _event(span: Span, pipeline_ranks: Mapping[str, int]) -> dict[str, Any]:
    name, args = _describe(span, pipeline_ranks)
    return {
        "ph": "X",
        "name": name,
        "pid": span.rank,
        "tid": STREAMS.index(_stream(span.action)),
        "ts": span.start_s * 1e6,
        "dur": span.duration_s * 1e6,
        "args": args,
    }


def _stream(action: Action) -> str:
    if isinstance(action, Compute):
        return "compute"
    return "data parallel" if isinstance(action, AsyncCollective) else "communication"


def _describe(span: Span, pipeline_ranks: Mapping[str, int]) -> tuple[str, dict[str, Any]]:
    match span.action:
        case Forward(stage, mb) | Backward(stage, mb) | Partial(stage, mb):
            args = {
                "kind": "partial" if isinstance(span.action, Partial) else direction(span.action),
                "unit": stage.unit,
                "stage": stage.index,
                "chunk": stage.index // pipeline_ranks[stage.unit],
                "replica": mb.replica,
                "microbatch": mb.index,
            }
            name = f"{direction(span.action)} {stage} {mb}"
            if isinstance(span.action, Partial):
                lo, hi = span.action.lo, span.action.hi
                return f"{name} {lo}:{hi}", args | {"lo": lo, "hi": hi}
            return name, args
        case Fill(host):
            raise AssertionError(f"a filled {host} runs part by part, and so do its spans")
        case Send(edge, src, dst, _, payload) | Recv(edge, src, dst, _, payload):
            return f"{payload} {src} to {dst}", {"kind": "p2p", "edge": str(edge), "bytes": span.nbytes}
        case Share(edge, mb, payload):
            return f"share {payload} {mb}", {"kind": "broadcast", "edge": str(edge), "bytes": span.nbytes}
        case Dispatch(edge, src_index, dst_index, payload):
            name = f"dispatch {payload}s {edge} {src_index} {dst_index}"
            return name, {"kind": "all_to_all", "edge": str(edge), "bytes": span.nbytes}
        case ReduceGrads(unit, chunk, bucket):
            return f"reduce {unit} chunk {chunk} bucket {bucket}", {"kind": "reduce_scatter", "bytes": span.nbytes}
        case GatherParams(unit, chunk, bucket):
            return f"gather {unit} chunk {chunk} bucket {bucket}", {"kind": "all_gather", "bytes": span.nbytes}
        case ReduceShared(name):
            return f"reduce {name}", {"kind": "all_reduce", "bytes": span.nbytes}
        case Step():
            return "step", {"kind": "all_reduce", "bytes": span.nbytes}
