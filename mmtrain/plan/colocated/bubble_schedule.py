"""Encoders in the bubbles of an LLM on the same ranks: which encoder plan, who computes what, and when.

The idea is that of Optimus (arXiv 2408.03505): the LLM's plan is fixed, its timeline known; an encoder has a plan of
its own (`pp` and `tp` divide the LLM's), so that m of its pipelines lie on one LLM pipeline's ranks and share its
microbatches. Forwards must have ended when the LLM's first stage starts their microbatch, backwards begin when it has
ended that; what finds no room in the bubbles lies before and after the LLM, and only that lengthens the step.

Here the two halves are mirror images. Backwards are placed as early as they fit, from their releases on. Forwards are
placed as late as they fit, which is the same with time running backwards, from the LLM's starts on. Then the earliest
forward says how long before the LLM a step begins, and the latest backward how long after it a step ends.
The i-th forward to end becomes LLM microbatch i.

Time begins with the LLM's first forward; any unit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as chained
from itertools import product

import numpy as np
import numpy.typing as npt

from mmtrain.plan.colocated.bubbles import (
    FloatArray,
    FreeTime,
    KernelChain,
    KernelSequence,
    PlacedKernels,
    place_kernels,
)

IntArray = npt.NDArray[np.int64]
LayerKernelSequences = tuple[KernelSequence, ...]  # in the order in which they run

NEAR = 1.0005  # a step within this factor of what no plan can beat is not searched further
TRIALS = 40  # ways to share microbatches out that are tried for a plan


@dataclass(frozen=True)
class LlmTimeline:
    """An LLM replica's timeline, as an encoder sees it."""

    free_times: tuple[FreeTime, ...]  # of each pipeline rank; all ranks of its tensor-parallel group have the same
    end: float  # of the last backward
    gather: float  # parameters, before the first forward
    scatter: float  # gradients, after the last backward
    first_forwards: FloatArray  # F: (microbatches,) when the LLM first needs each
    last_backwards: FloatArray  # B: (microbatches,) when the gradients of its inputs are there
    transfer: float  # from a rank to another

    @property
    def step_time(self) -> float:
        """T: of the LLM alone."""
        return self.gather + self.end + self.scatter


@dataclass(frozen=True)
class EncoderPlan:
    """An encoder's sizes on the ranks of one LLM replica, and its layers' kernels for one LLM microbatch."""

    tp: int
    pp: int
    tp_groups_per_rank: int  # tensor-parallel groups of the encoder on one pipeline rank of the LLM
    forward: tuple[LayerKernelSequences, ...]  # (pp,) of each stage
    backward: tuple[LayerKernelSequences, ...]  # (pp,) of each stage, last layer first; empty if nothing trains
    cut_cost: float = 0.0  # share of a kernel that each cut of it adds

    def num_pipelines(self, host: LlmTimeline) -> int:
        """How many of its pipelines share the LLM's microbatches: m."""
        return len(host.free_times) // self.pp * self.tp_groups_per_rank

    def place(self, pipeline: int, stage: int) -> int:
        """The LLM's pipeline rank that holds a stage of a pipeline."""
        return pipeline // self.tp_groups_per_rank * self.pp + stage


@dataclass(frozen=True)
class EncoderSchedule:
    """Where every kernel of an encoder went."""

    host: LlmTimeline
    plan: EncoderPlan
    owner: IntArray  # (microbatches,) pipeline that computes it
    forward: Mapping[tuple[int, int], PlacedKernels]  # (pipeline, stage) -> kernels; chains are microbatches
    backward: Mapping[tuple[int, int], PlacedKernels]
    forward_ends: FloatArray  # EF: (microbatches,) when the LLM's first rank has its output
    head: float  # how long before the LLM's first forward the first kernel starts
    tail: float  # how long after its last backward the last kernel ends

    @property
    def step_time(self) -> float:
        """Seconds, or what the unit is."""
        return _step_time(self.host, self.head, self.tail)

    @cached_property
    def efficiency(self) -> float:
        """Share of the encoder's compute time that lies inside the LLM's own step."""
        first, last = -self.host.gather, self.host.end + self.host.scatter
        inside = total = 0.0
        for placed in chained(self.forward.values(), self.backward.values()):
            spans = placed.spans[placed.computes]
            total += float((spans[:, 1] - spans[:, 0]).sum())
            inside += float(np.maximum(0.0, np.minimum(spans[:, 1], last) - np.maximum(spans[:, 0], first)).sum())
        return inside / total if total else 1.0


def step_time_lower_bound(host: LlmTimeline, plan: EncoderPlan) -> float:
    """A step time that no schedule of this plan can beat.

    The k-th microbatch that a pipeline computes takes at least its way through the stages and k - 1 times the busiest
    stage, so the i-th to end of m pipelines has k = i / m, rounded up; backwards are the same from the end.
    """
    rounds = np.arange(len(host.first_forwards)) // plan.num_pipelines(host)
    head = np.max(_least(host, plan, plan.forward, rounds) - np.sort(host.first_forwards))
    late = np.sort(host.last_backwards)[::-1]
    tail = np.max(_least(host, plan, plan.backward, rounds) + late) - host.end if plan.backward else 0.0
    return _step_time(host, float(head), float(tail))


def search_shares(host: LlmTimeline, plan: EncoderPlan, *, whole_layers: bool = False) -> EncoderSchedule:
    """Share the microbatches out among the plan's pipelines and place all kernels.

    Few microbatches are dealt out in all ways. Many start from equal shares, and are taken from the pipeline that ends
    last, or begins first, while that shortens the step.

    Args:
        host: the LLM's timeline.
        plan: the encoder's.
        whole_layers: coarse: only before a rank's first LLM kernel and after its last, layer by layer. Otherwise fine:
            kernel by kernel into every bubble.
    """
    place = _coarse if whole_layers else _fine
    num_pipelines, total = plan.num_pipelines(host), len(host.first_forwards)
    enough, trials = step_time_lower_bound(host, plan) * NEAR, TRIALS
    equal = [total // num_pipelines + (k < total % num_pipelines) for k in range(num_pipelines)]
    best = place(host, plan, _owners(equal))
    for owner in product(range(num_pipelines), repeat=total) if num_pipelines**total <= TRIALS else ():
        if best.step_time > enough:
            best = _faster(best, place(host, plan, np.array(owner)))
    slow = _slowest(best)
    others = [k for k in range(num_pipelines) if k != slow]
    while others and trials and best.step_time > enough:
        shares = np.bincount(best.owner, minlength=num_pipelines)
        shares[slow] -= 1
        shares[others.pop(0)] += 1
        found, trials = _faster(best, place(host, plan, _owners(shares.tolist()))), trials - 1
        if found is not best:
            best, slow = found, _slowest(found)
            others = [k for k in range(num_pipelines) if k != slow]
    return best


def _faster(best: EncoderSchedule, other: EncoderSchedule) -> EncoderSchedule:
    return other if other.step_time < best.step_time * (1 - 1e-9) else best


def schedule_encoder(host: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> EncoderSchedule:
    """Place all kernels when it is settled who computes which microbatch, whichever ends first."""
    return _place(
        host, replace(plan, forward=_joined(plan.forward), backward=_joined(plan.backward)), owner, plan, False
    )


def search_encoder_plans(host: LlmTimeline, plans: Iterable[EncoderPlan]) -> EncoderSchedule:
    """The fine schedule of least step time, over all plans; those whose bound is no better are not tried.

    A plan's coarse schedule is taken where the fine one is no faster.
    """
    best: EncoderSchedule | None = None
    for least, plan in sorted(((step_time_lower_bound(host, plan), plan) for plan in plans), key=lambda item: item[0]):
        if best is not None and best.step_time <= least * NEAR:
            break
        for whole_layers in (False, True):
            if best is None or best.step_time > least * NEAR:
                found = search_shares(host, plan, whole_layers=whole_layers)
                best = found if best is None or found.step_time < best.step_time else best
    assert best is not None, "search is given plans"
    return best


def _step_time(host: LlmTimeline, head: float, tail: float) -> float:
    return host.end + max(head, host.gather) + max(tail, host.scatter)


def _least(
    host: LlmTimeline, plan: EncoderPlan, stages: Sequence[LayerKernelSequences], rounds: IntArray
) -> FloatArray:
    """Time from the first kernel to the end of a pipeline's microbatch of each round."""
    way = sum(kernels.latency for layers in stages for kernels in layers) + (plan.pp - 1) * host.transfer
    busiest = max((sum(kernels.compute_time for kernels in layers) for layers in stages), default=0.0)
    return np.asarray(way + rounds * busiest)


def _owners(shares: Sequence[int]) -> IntArray:
    """Deal microbatches out: in turn, those with larger shares more often."""
    turns = [((k + 0.5) / share, pipeline) for pipeline, share in enumerate(shares) for k in range(share)]
    return np.array([pipeline for _, pipeline in sorted(turns)], dtype=np.int64)


def _slowest(found: EncoderSchedule) -> int:
    """The pipeline that lengthens the step most."""
    late = {key: float(p.spans[:, 1].max()) - found.host.end for key, p in found.backward.items() if len(p.spans)}
    early = {key: -float(p.spans[:, 0].min()) for key, p in found.forward.items() if len(p.spans)}
    over_tail = max(late.values(), default=0.0) - found.host.scatter
    over_head = max(early.values(), default=0.0) - found.host.gather
    worst = late if over_tail > over_head else early
    return max(worst, key=lambda key: worst[key])[0]


def _fine(host: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> EncoderSchedule:
    """Kernel by kernel into every gap."""
    stages = replace(plan, forward=_joined(plan.forward), backward=_joined(plan.backward))
    return _place(host, stages, owner, plan)


def _coarse(host: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> EncoderSchedule:
    """Layer by layer before and after the LLM's work on each rank."""
    outer = tuple(FreeTime(free.compute[[0, -1]], free.link[[0, -1]]) for free in host.free_times)
    stages = replace(plan, forward=_blocks(plan.forward), backward=_blocks(plan.backward))
    found = _place(replace(host, free_times=outer), stages, owner, plan)
    forward = {key: _expanded(placed, plan.forward[key[1]]) for key, placed in found.forward.items()}
    backward = {key: _expanded(placed, plan.backward[key[1]]) for key, placed in found.backward.items()}
    return replace(found, host=host, forward=forward, backward=backward)


def _place(
    host: LlmTimeline, stages: EncoderPlan, owner: IntArray, plan: EncoderPlan, renumber: bool = True
) -> EncoderSchedule:
    """Place forwards as late and then backwards as early as they fit; `stages` has one `KernelSequence` a stage.

    renumber: the i-th forward to end becomes LLM microbatch i.
    """
    forward: dict[tuple[int, int], PlacedKernels] = {}
    backward: dict[tuple[int, int], PlacedKernels] = {}
    ends, head, tail = np.empty(len(owner)), 0.0, 0.0
    for pipeline in range(plan.num_pipelines(host)):
        mine = np.flatnonzero(owner == pipeline)
        due = host.first_forwards[mine] - _way(host, plan, pipeline)
        for stage in reversed(range(plan.pp)):
            [kernels] = stages.forward[stage]
            chains = [KernelChain(int(mb), -float(t), kernels.mirrored()) for mb, t in zip(mine, due, strict=True)]
            placed, ready = place_kernels(
                host.free_times[plan.place(pipeline, stage)].mirrored(), chains[::-1], plan.cut_cost
            )
            forward[pipeline, stage] = placed.mirrored(len(kernels.durations))
            if stage == plan.pp - 1:
                ends[mine] = _ends(forward[pipeline, stage], mine) + _way(host, plan, pipeline)
            due = np.array([-ready[int(mb)] for mb in mine]) - host.transfer
        head = max(head, *(-due - host.transfer), 0.0)
    order = np.argsort(ends, kind="stable") if renumber else np.arange(len(ends))
    label = np.argsort(order)
    forward = {key: replace(placed, chains=label[placed.chains]) for key, placed in forward.items()}
    owner, ends = owner[order], ends[order]
    for pipeline in range(plan.num_pipelines(host)) if plan.backward else ():
        mine = np.flatnonzero(owner == pipeline)
        release = host.last_backwards[mine] + _way(host, plan, pipeline)
        for stage in reversed(range(plan.pp)):
            [kernels] = stages.backward[stage]
            chains = [KernelChain(int(mine[k]), float(release[k]), kernels) for k in np.argsort(release, kind="stable")]
            free = host.free_times[plan.place(pipeline, stage)].without(forward[pipeline, stage])
            backward[pipeline, stage], done = place_kernels(free, chains, plan.cut_cost)
            release = np.array([done[int(mb)] for mb in mine]) + host.transfer
        tail = max(tail, *(release - host.transfer - host.end), 0.0)
    return EncoderSchedule(host, plan, owner, forward, backward, ends, head, tail)


def _way(host: LlmTimeline, plan: EncoderPlan, pipeline: int) -> float:
    """Between a pipeline's last stage and the LLM's first rank."""
    return host.transfer if plan.place(pipeline, plan.pp - 1) > 0 else 0.0


def _ends(placed: PlacedKernels, mine: IntArray) -> FloatArray:
    """When the last kernel of each chain ends."""
    return np.array([placed.spans[placed.chains == mb, 1].max() for mb in mine])


def _joined(stages: Sequence[LayerKernelSequences]) -> tuple[LayerKernelSequences, ...]:
    """Each stage's kernels as one sequence."""
    return tuple((KernelSequence.joined(layers),) for layers in stages)


def _blocks(stages: Sequence[LayerKernelSequences]) -> tuple[LayerKernelSequences, ...]:
    """Each layer as one kernel."""
    return tuple((KernelSequence.of([k.latency for k in layers], [True] * len(layers)),) for layers in stages)


def _expanded(placed: PlacedKernels, layers: LayerKernelSequences) -> PlacedKernels:
    """Kernels in place of the layers that `_blocks` made one."""
    kernels = KernelSequence.joined(layers)
    sizes = np.array([len(k.durations) for k in layers])
    first = np.cumsum(sizes) - sizes
    ends = np.cumsum(kernels.durations)
    starts = ends - kernels.durations
    repeat = sizes[placed.kernels]
    begun = np.cumsum(repeat) - repeat
    which = np.arange(repeat.sum()) + np.repeat(first[placed.kernels] - begun, repeat)
    shift = np.repeat(placed.spans[:, 0] - starts[first[placed.kernels]], repeat)
    spans = np.stack([starts[which], ends[which]], axis=1) + shift[:, None]
    return PlacedKernels(spans, np.repeat(placed.chains, repeat), which, np.array(kernels.computes)[which])
