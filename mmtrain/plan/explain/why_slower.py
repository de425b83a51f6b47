"""Why a plan that fits lost: what takes its ranks longer than those of the plan that won."""

import math

from mmtrain.plan.estimate.evaluate import Candidate
from mmtrain.program.ir.graph import StageId

MAX_NAMED_STAGES = 2  # that are named with their layers


def explain_slower(loser: Candidate, chosen: Candidate) -> str:
    """One line on a plan that takes longer than the chosen one.

    A step is what ranks compute, on average, and what they idle; the reason is whichever of the two has grown more.
    """
    ratio = f"{loser.step_time_s / chosen.step_time_s:.2f}x slower"
    computed, before = _computed(loser), _computed(chosen)
    if computed - before >= (loser.step_time_s - chosen.step_time_s) / 2:
        return f"{ratio}: its ranks compute {_change(computed / before)} more{_because(loser, chosen)}"
    idle, idled = 1 - computed / loser.step_time_s, 1 - before / chosen.step_time_s
    if loser.busiest_s - computed >= (loser.step_time_s - computed) / 2:
        share = loser.busiest_s / loser.step_time_s
        return f"{ratio}: uneven, ranks with {_held(loser)} compute {share:.0%} of it, the mean rank {1 - idle:.0%}"
    grown = {kind: share * loser.step_time_s for kind, share in loser.bubbles.items()}
    for kind, share in chosen.bubbles.items():
        grown[kind] = grown.get(kind, 0.0) - share * chosen.step_time_s
    most = max(grown, key=lambda kind: grown[kind])
    return f"{ratio}: ranks idle {idle:.0%} of it (chosen {idled:.0%}), more {most}"


def explain_measured_slower(loser: Candidate, chosen: Candidate, ran: float) -> str:
    """The same of a plan whose step took `ran` times that of the chosen one when both were run; inf: it did not run."""
    if math.isinf(ran):
        return "could not be run here"
    return f"{ran:.2f}x slower as measured, {loser.step_time_s / chosen.step_time_s:.2f}x predicted"


def _computed(judged: Candidate) -> float:
    """Seconds of a step that ranks compute, on average."""
    return (1 - sum(judged.bubbles.values())) * judged.step_time_s


def _change(ratio: float) -> str:
    return f"{ratio - 1:.0%}" if ratio < 2 else f"{ratio:.2g} times"


def _because(loser: Candidate, chosen: Candidate) -> str:
    """What may explain that ranks compute longer: there are fewer, or more is computed twice."""
    ranks, before = loser.graph.world_size, chosen.graph.world_size
    if ranks < before:
        return f", being {ranks} and not {before}"
    again, once = _recomputed(loser), _recomputed(chosen)
    return f", recomputing {again} layers and not {once}" if again > once else ""


def _recomputed(judged: Candidate) -> int:
    return sum(unit.num_recomputed for unit in judged.layout.units.values())


def _held(judged: Candidate) -> str:
    """What the busiest ranks hold: `vision 0-7`, or the units where there are many stages."""
    if len(judged.busiest_stages) > MAX_NAMED_STAGES:
        return " and ".join(dict.fromkeys(sid.unit for sid in judged.busiest_stages))
    return " and ".join(_layers(judged, sid) for sid in judged.busiest_stages)


def _layers(judged: Candidate, sid: StageId) -> str:
    lo, hi = judged.graph.stage(sid).layers
    return f"{sid.unit} {lo}-{hi - 1}" if hi - lo > 1 else f"{sid.unit} {lo}"
