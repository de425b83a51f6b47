"""How unevenly fast the ranks of a run were (`cluster.time_spread`), from the passes that a trace recorded."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, pvariance, variance
from typing import Any, NamedTuple

from mmtrain.costs.time_spread import TimeSpread
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import Timeline, chrome_trace
from mmtrain.report.comparison import COMPUTE_TID, RunTrace

MIN_PASSES = 8  # of a stage and direction on a rank; fewer say little about their deviation


class _Peers(NamedTuple):
    """Passes that ranks can be compared by: those of one stage and direction."""

    unit: str
    stage: int
    letter: str


PassKey = tuple[int, int, int]  # step, replica, microbatch


def recorded_spread(trace: RunTrace | None, simulated: Sequence[Timeline], plan: Plan) -> TimeSpread | None:
    """Return the spread between the replicas of each stage, and between the passes of layers on one rank.

    Recorded seconds are divided by simulated ones, so that loads do not count, and by their mean in the same step. What
    the costs are wrong about in some loads counts as a deviation of layers, so that one is at most as large.

    simulated: the steps of the trace. None without a trace, or if no stage has replicas or enough passes.
    """
    if trace is None:
        return None
    starts = [step["ts"] for step in trace.content["otherData"]["steps"]]
    recorded = _passes(trace.content["traceEvents"], starts)
    predicted: dict[_Peers, dict[PassKey, float]] = defaultdict(dict)
    for number, timeline in enumerate(simulated):
        for peers, passes in _passes(chrome_trace(timeline, "")["traceEvents"], [-math.inf]).items():
            predicted[peers] |= {(number, *key[1:]): seconds for key, seconds in passes.items()}
    between_ranks, between_layers = [], []
    for peers, seconds in recorded.items():
        relative_times = _relative_times(seconds, predicted[peers])
        means = [fmean(of_rank) for of_rank in relative_times.values()]
        if not means or min(map(len, relative_times.values())) < MIN_PASSES:
            continue
        lo, hi = plan.units[peers.unit].stages[peers.stage].layers
        within = fmean(pvariance(of_rank) for of_rank in relative_times.values())
        between_layers.append((hi - lo) * within)
        if len(means) > 1:
            passes_of_rank = fmean(map(len, relative_times.values()))
            between_ranks.append(max(0.0, variance(means) - within / passes_of_rank))
    if not between_ranks:
        return None
    return TimeSpread(math.sqrt(fmean(between_ranks)), math.sqrt(fmean(between_layers)))


def _passes(events: Iterable[Mapping[str, Any]], starts: Sequence[float]) -> dict[_Peers, dict[PassKey, float]]:
    """Return seconds of each pass on the slowest rank of its TP group; parts of a pass are joined.

    starts: of the steps.
    """
    by_rank: defaultdict[_Peers, defaultdict[tuple[PassKey, int], float]]
    by_rank = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event["ph"] != "X" or event["tid"] != COMPUTE_TID:
            continue
        args = event["args"]
        step = sum(start <= event["ts"] for start in starts) - 1
        key = step, args["replica"], args["microbatch"]
        by_rank[_Peers(args["unit"], args["stage"], event["name"][0])][key, event["pid"]] += event["dur"]
    passes: dict[_Peers, dict[PassKey, float]] = {}
    for peers, seconds in by_rank.items():
        of_pass: dict[PassKey, float] = {}
        for (key, _), duration in seconds.items():
            of_pass[key] = max(duration, of_pass.get(key, 0.0))
        passes[peers] = of_pass
    return passes


def _relative_times(recorded: Mapping[PassKey, float], predicted: Mapping[PassKey, float]) -> dict[int, list[float]]:
    """Return by replica its recorded over predicted seconds, over their mean in the same step."""
    ratios = {key: seconds / predicted[key] for key, seconds in recorded.items() if predicted.get(key)}
    of_step: defaultdict[int, list[float]] = defaultdict(list)
    for (step, *_), ratio in ratios.items():
        of_step[step].append(ratio)
    means = {step: fmean(values) for step, values in of_step.items()}
    relative_times: defaultdict[int, list[float]] = defaultdict(list)
    for (step, replica, _), ratio in ratios.items():
        relative_times[replica].append(ratio / means[step])
    return dict(relative_times)
