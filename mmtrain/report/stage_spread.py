"""How much a stage's input, time and memory vary over the microbatches and steps of a trace (OmniBal's table 1)."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from mmtrain.costs.hardware import GIB
from mmtrain.program import Timeline
from mmtrain.report.comparison import COMPUTE_TID, RunTrace
from mmtrain.report.plain_text import memory_text, seconds_text

STAGE_SPREAD_TITLE = "Spread of stages in the recorded steps, mean ± standard deviation"
STAGE_SPREAD_HEAD = ("stage", "tokens", "forward", "activations, simulated")
STAGE_SPREAD_NOTE = (
    "A stage's row is over its microbatches, replicas, ranks and steps; activations are the most that each of its "
    "ranks holds in a step. The last row is over the means of the stages."
)
BETWEEN_STAGES = "between stages"
_SECONDS_PER_US = 1e-6


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of some values."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of values; None without any."""
        return cls(fmean(values), pstdev(values)) if values else None


@dataclass(frozen=True)
class StageSpread:
    """How one stage varies, or the stages among each other; None for what the trace or the simulation does not hold."""

    stage: str  # as `vision.0`, or `BETWEEN_STAGES`
    tokens: Spread | None  # that one microbatch has in the stage's unit
    forward_s: Spread | None  # of one microbatch on one rank
    activation_bytes: Spread | None  # the most that is alive at once on a rank of the stage in a step, simulated

    def cells(self) -> list[str]:
        """Return the cells under `STAGE_SPREAD_HEAD`."""
        tokens, forward, memory = self.tokens, self.forward_s, self.activation_bytes
        return [
            self.stage,
            "-" if tokens is None else f"{tokens.mean:.4g} ± {tokens.deviation:.3g}",
            "-" if forward is None else f"{seconds_text(forward.mean)} ± {seconds_text(forward.deviation)}",
            "-" if memory is None else f"{memory_text(memory.mean / GIB)} ± {memory_text(memory.deviation / GIB)}",
        ]


def stage_spreads(trace: RunTrace | None, simulated: Sequence[Timeline]) -> list[StageSpread]:
    """Return a row for each stage that ran forward in the trace, then one for the differences between stages.

    simulated: the steps of the trace. Returns nothing without a trace.
    """
    if trace is None:
        return []
    steps = trace.content["otherData"]["steps"]
    starts = [step["ts"] for step in steps]
    seconds: defaultdict[tuple[str, int], defaultdict[tuple[int, ...], float]]
    seconds = defaultdict(lambda: defaultdict(float))  # (unit, stage) -> (step, rank, replica, microbatch) -> seconds
    for event in trace.content["traceEvents"]:
        if event["ph"] != "X" or event["tid"] != COMPUTE_TID or event["name"][0] != "F":
            continue
        args = event["args"]
        step = bisect_right(starts, event["ts"]) - 1
        forward = (step, event["pid"], args["replica"], args["microbatch"])
        seconds[args["unit"], args["stage"]][forward] += event["dur"] * _SECONDS_PER_US  # parts of a pass are joined
    rows = []
    for (unit, stage), of_forwards in sorted(seconds.items()):
        ranks = {rank for _, rank, *_ in of_forwards}
        tokens = [count for step in steps for count in step.get("tokens", {}).get(unit, ())]
        peaks = [peak for t in simulated for rank, peak in t.peak_memory_bytes.items() if rank in ranks]
        name = f"{unit}.{stage}"
        rows.append(StageSpread(name, Spread.of(tokens), Spread.of(list(of_forwards.values())), Spread.of(peaks)))
    return [*rows, _between(rows)] if len(rows) > 1 else rows


def _between(rows: Sequence[StageSpread]) -> StageSpread:
    """Return the mean and deviation of the stages' means."""
    tokens = [row.tokens.mean for row in rows if row.tokens is not None]
    forwards = [row.forward_s.mean for row in rows if row.forward_s is not None]
    peaks = [row.activation_bytes.mean for row in rows if row.activation_bytes is not None]
    return StageSpread(BETWEEN_STAGES, Spread.of(tokens), Spread.of(forwards), Spread.of(peaks))
