"""Search the encoder plan and the shares of microbatches with which a kernel table's step is shortest."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, product

import numpy as np

from mmtrain.planning.colocated.bubble_schedule import (
    EncoderPlan,
    EncoderSchedule,
    IntArray,
    LlmTimeline,
    StageKernelLists,
    schedule_encoder,
    step_time_around,
)
from mmtrain.planning.colocated.bubbles import FloatArray, FreeTime, KernelSequence, PlacedKernels

STEP_TIME_TOLERANCE = 1.0005  # a step within this factor of its lower bound is not searched further
MAX_SHARE_TRIALS = 40  # ways to share out the microbatches that are tried for a plan


def step_time_lower_bound(llm: LlmTimeline, plan: EncoderPlan) -> float:
    """Return a step time that no schedule of this plan can beat.

    The k-th microbatch that a pipeline computes takes at least the latency of all stages plus k - 1 times the compute
    time of the busiest stage. So the i-th microbatch to end on m pipelines has k = ceil(i / m). Backwards are the same
    from the end.
    """
    rounds = np.arange(len(llm.first_forwards)) // plan.num_pipelines(llm)
    head = np.max(_min_duration(llm, plan, plan.forward, rounds) - np.sort(llm.first_forwards))
    tail = 0.0
    if plan.backward:
        latest_first = np.sort(llm.last_backwards)[::-1]
        tail = np.max(_min_duration(llm, plan, plan.backward, rounds) + latest_first) - llm.end
    return step_time_around(llm, float(head), float(tail))


def search_shares(llm: LlmTimeline, plan: EncoderPlan, *, whole_layers: bool = False) -> EncoderSchedule:
    """Share the microbatches out among the plan's pipelines and place all kernels.

    For few microbatches all ways to share them out are tried. For many the search starts from equal shares and moves
    microbatches away from the pipeline that ends last, or starts first, while that shortens the step.

    Args:
        llm: the LLM's timeline.
        plan: the encoder's mesh and kernels.
        whole_layers: coarse: only before a rank's first LLM kernel and after its last, layer by layer. Otherwise fine:
            kernel by kernel into every bubble.
    """
    place = _place_coarse if whole_layers else _place_fine
    num_pipelines = plan.num_pipelines(llm)
    num_microbatches = len(llm.first_forwards)
    good_enough = step_time_lower_bound(llm, plan) * STEP_TIME_TOLERANCE
    equal_shares = [
        num_microbatches // num_pipelines + (pipeline < num_microbatches % num_pipelines)
        for pipeline in range(num_pipelines)
    ]
    best = place(llm, plan, _interleave(equal_shares))
    if num_pipelines**num_microbatches <= MAX_SHARE_TRIALS:
        for owner in product(range(num_pipelines), repeat=num_microbatches):
            if best.step_time > good_enough:
                best = _faster(best, place(llm, plan, np.array(owner)))
    slowest = _slowest_pipeline(best)
    untried = [pipeline for pipeline in range(num_pipelines) if pipeline != slowest]
    trials = MAX_SHARE_TRIALS
    while untried and trials and best.step_time > good_enough:
        shares = np.bincount(best.owner, minlength=num_pipelines)
        shares[slowest] -= 1
        shares[untried.pop(0)] += 1
        schedule = _faster(best, place(llm, plan, _interleave(shares.tolist())))
        trials -= 1
        if schedule is not best:
            best = schedule
            slowest = _slowest_pipeline(schedule)
            untried = [pipeline for pipeline in range(num_pipelines) if pipeline != slowest]
    return best


def search_encoder_plans(llm: LlmTimeline, plans: Iterable[EncoderPlan]) -> EncoderSchedule:
    """Return the fastest schedule over all plans; plans whose lower bound is no better are not tried.

    A plan's coarse schedule is taken where the fine one is no faster.
    """
    best: EncoderSchedule | None = None
    by_bound = sorted(((step_time_lower_bound(llm, plan), plan) for plan in plans), key=lambda item: item[0])
    for bound, plan in by_bound:
        if best is not None and best.step_time <= bound * STEP_TIME_TOLERANCE:
            break
        for whole_layers in (False, True):
            if best is None or best.step_time > bound * STEP_TIME_TOLERANCE:
                schedule = search_shares(llm, plan, whole_layers=whole_layers)
                if best is None or schedule.step_time < best.step_time:
                    best = schedule
    assert best is not None, "there is at least one plan"
    return best


def compute_share_inside_llm(schedule: EncoderSchedule) -> float:
    """Return the share of the encoder's compute time that lies inside the LLM's own step (Optimus' efficiency)."""
    start = -schedule.llm.gather
    end = schedule.llm.end + schedule.llm.scatter
    inside = total = 0.0
    for placed in chain(schedule.forward.values(), schedule.backward.values()):
        spans = placed.spans[placed.computes]
        total += float((spans[:, 1] - spans[:, 0]).sum())
        inside += float(np.maximum(0.0, np.minimum(spans[:, 1], end) - np.maximum(spans[:, 0], start)).sum())
    return inside / total if total else 1.0


def _min_duration(llm: LlmTimeline, plan: EncoderPlan, stages: StageKernelLists, rounds: IntArray) -> FloatArray:
    """Return the least time from the first kernel to the end of a pipeline's microbatch of each round."""
    latency = sum(kernels.latency for layers in stages for kernels in layers) + (plan.pp - 1) * llm.transfer
    busiest = max((sum(_compute_time(kernels) for kernels in layers) for layers in stages), default=0.0)
    return np.asarray(latency + rounds * busiest)


def _compute_time(kernels: KernelSequence) -> float:
    """Return the time of the compute kernels, uncut."""
    return float(sum(d for d, computes in zip(kernels.durations, kernels.computes, strict=True) if computes))


def _faster(best: EncoderSchedule, other: EncoderSchedule) -> EncoderSchedule:
    return other if other.step_time < best.step_time * (1 - 1e-9) else best


def _interleave(shares: Sequence[int]) -> IntArray:
    """Return the owner of each microbatch: pipelines take turns, those with larger shares more often."""
    positions = [((k + 0.5) / share, pipeline) for pipeline, share in enumerate(shares) for k in range(share)]
    return np.array([pipeline for _, pipeline in sorted(positions)], dtype=np.int64)


def _slowest_pipeline(schedule: EncoderSchedule) -> int:
    """Return the pipeline that lengthens the step most."""
    llm = schedule.llm
    late = {key: float(p.spans[:, 1].max()) - llm.end for key, p in schedule.backward.items() if len(p.spans)}
    early = {key: -float(p.spans[:, 0].min()) for key, p in schedule.forward.items() if len(p.spans)}
    over_tail = max(late.values(), default=0.0) - llm.scatter
    over_head = max(early.values(), default=0.0) - llm.gather
    excess = late if over_tail > over_head else early
    return max(excess, key=lambda key: excess[key])[0]


def _place_fine(llm: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> EncoderSchedule:
    """Place kernel by kernel into every bubble."""
    return schedule_encoder(llm, plan, owner, renumber=True)


def _place_coarse(llm: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> EncoderSchedule:
    """Place layer by layer before and after the LLM's work on each rank."""
    outer = tuple(FreeTime(free.compute[[0, -1]], free.link[[0, -1]]) for free in llm.free_times)
    by_layer = replace(plan, forward=_one_kernel_per_layer(plan.forward), backward=_one_kernel_per_layer(plan.backward))
    coarse = schedule_encoder(replace(llm, free_times=outer), by_layer, owner, renumber=True)
    forward = {key: _kernels_of_layers(placed, plan.forward[key[1]]) for key, placed in coarse.forward.items()}
    backward = {key: _kernels_of_layers(placed, plan.backward[key[1]]) for key, placed in coarse.backward.items()}
    return replace(coarse, llm=llm, plan=plan, forward=forward, backward=backward)


def _one_kernel_per_layer(stages: StageKernelLists) -> StageKernelLists:
    """Return stages in which each layer is one compute kernel."""
    return tuple((KernelSequence.of([k.latency for k in layers], [True] * len(layers)),) for layers in stages)


def _kernels_of_layers(placed: PlacedKernels, layers: Sequence[KernelSequence]) -> PlacedKernels:
    """Return the kernels of layers that `_one_kernel_per_layer` joined and that were placed as wholes."""
    kernels = KernelSequence.concatenate(layers)
    kernels_per_layer = np.array([len(k.durations) for k in layers])
    first_kernel = np.cumsum(kernels_per_layer) - kernels_per_layer
    ends = np.cumsum(kernels.durations)
    starts = ends - kernels.durations
    repeat = kernels_per_layer[placed.kernel_index]
    first_row = np.cumsum(repeat) - repeat
    index = np.arange(repeat.sum()) + np.repeat(first_kernel[placed.kernel_index] - first_row, repeat)
    shift = np.repeat(placed.spans[:, 0] - starts[first_kernel[placed.kernel_index]], repeat)
    spans = np.stack([starts[index], ends[index]], axis=1) + shift[:, None]
    return PlacedKernels(spans, np.repeat(placed.labels, repeat), index, np.array(kernels.computes)[index])
