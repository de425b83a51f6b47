"""Check a colocated schedule from its rows alone, and find the optimum of tiny instances by exhaustive search."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from mmtrain.planning.colocated.bubble_schedule import EncoderPlan, EncoderSchedule, LlmTimeline
from mmtrain.planning.colocated.bubbles import KernelSequence, PlacedKernels

CLOSE = 1e-5
Spans = Sequence[tuple[float, float]]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def check_schedule(schedule: EncoderSchedule, busy: Sequence[Spans]) -> None:
    """Fail unless the schedule could run beside an LLM whose ranks compute at `busy`."""
    llm, plan = schedule.llm, schedule.plan
    num_microbatches = len(llm.first_forwards)
    for (pipeline, stage), forward in schedule.forward.items():
        backward = schedule.backward.get((pipeline, stage))
        rank = plan.llm_pipeline_rank(pipeline, stage)
        rows = list(_rows(forward)) + (list(_rows(backward)) if backward is not None else [])
        _check_no_overlap([(a, b) for a, b, computes in rows if computes], busy[rank])
        _check_no_overlap([(a, b) for a, b, computes in rows if not computes], _between(llm.free_times[rank].link))
    for mb in range(num_microbatches):
        pipeline = int(schedule.owner[mb])
        ready = -np.inf
        for stage in range(plan.pp):
            start, end = _check_chain(schedule.forward[pipeline, stage], mb, plan.forward[stage])
            assert start >= ready - CLOSE
            assert -start <= schedule.head + CLOSE
            ready = end
        assert end <= llm.first_forwards[mb] + CLOSE
        ready = llm.last_backwards[mb]
        for stage in reversed(range(plan.pp)) if plan.backward else ():
            start, end = _check_chain(schedule.backward[pipeline, stage], mb, plan.backward[stage])
            assert start >= ready - CLOSE
            assert end - llm.end <= schedule.tail + CLOSE
            ready = end
    placed = [p for half in (schedule.forward, schedule.backward) for p in half.values()]
    per_microbatch = sum(len(layer.durations) for half in (plan.forward, plan.backward) for s in half for layer in s)
    kernels = sum(len({*zip(p.labels.tolist(), p.kernel_index.tolist(), strict=True)}) for p in placed)
    assert kernels == num_microbatches * per_microbatch, "every kernel of every microbatch, and no others"


def _between(free: FloatArray) -> Spans:
    """Return what lies between free intervals."""
    return list(zip(free[:-1, 1].tolist(), free[1:, 0].tolist(), strict=True))


def _rows(placed: PlacedKernels) -> Iterator[tuple[float, float, bool]]:
    for (start, end), computes in zip(placed.spans.tolist(), placed.computes.tolist(), strict=True):
        yield start, end, computes


def _check_no_overlap(spans: Spans, others: Spans) -> None:
    """Fail if any two of all spans overlap."""
    everything = np.array(sorted([*spans, *others]))
    assert np.all(everything[:, 0] <= everything[:, 1])
    assert np.all(everything[1:, 0] >= everything[:-1, 1] - CLOSE)


def _check_chain(placed: PlacedKernels, mb: int, layers: tuple[KernelSequence, ...]) -> tuple[float, float]:
    """Fail unless each kernel has its duration and follows the one before; return the first start and the last end."""
    is_of_chain = placed.labels == mb
    spans, index, computes = placed.spans[is_of_chain], placed.kernel_index[is_of_chain], placed.computes[is_of_chain]
    order = np.lexsort((spans[:, 0], index))
    spans, index, computes = spans[order], index[order], computes[order]
    assert np.all(spans[1:, 0] >= spans[:-1, 1] - CLOSE)
    durations = np.array([d for layer in layers for d in layer.durations])
    assert index.tolist() == list(range(len(durations)))
    assert np.allclose(spans[:, 1] - spans[:, 0], durations, atol=CLOSE)
    assert computes.tolist() == np.array([c for layer in layers for c in layer.computes])[index].tolist()
    return float(spans[0, 0]), float(spans[-1, 1])


def least_time_outside(llm: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> float:
    """Find the least time before and after the LLM by trying every start and order.

    For whole numbers, pp 1 and no collectives. owner: (microbatches,) the pipeline that computes each.
    """
    furthest = int(sum(k.latency for k in plan.forward[0]) * len(owner))
    groups = [tuple(np.flatnonzero(owner == k).tolist()) for k in range(plan.num_pipelines(llm))]
    best = np.inf
    for head in range(furthest + 1):
        if head >= best:
            break
        tail = max(_least_tail(llm, plan, k, microbatches, head) for k, microbatches in enumerate(groups))
        best = min(best, head + max(tail, 0.0))
    return best


def _least_tail(llm: LlmTimeline, plan: EncoderPlan, pipeline: int, microbatches: tuple[int, ...], head: int) -> float:
    """Return the least time that a rank needs after the LLM if it starts `head` before it; infinite if F is missed."""
    forward = [d for k in plan.forward[0] for d in k.durations]
    backward = [d for layers in plan.backward for k in layers for d in k.durations]
    rank = plan.llm_pipeline_rank(pipeline, 0)
    free = [(max(a, -head), b) for a, b in llm.free_times[rank].compute.tolist() if b > -head]
    chains = [(forward, -float(head), float(llm.first_forwards[mb])) for mb in microbatches]
    chains += [(backward, float(llm.last_backwards[mb]), np.inf) for mb in microbatches if backward]
    best = np.inf
    seen: set[tuple[tuple[int, ...], tuple[float, ...]]] = set()

    def extend(done: tuple[int, ...], ready: tuple[float, ...], clock: float) -> None:
        nonlocal best
        state = done, tuple(max(clock, t) for t in ready)
        if clock - llm.end >= best or state in seen:
            return
        seen.add(state)
        if all(count == len(chain[0]) for count, chain in zip(done, chains, strict=True)):
            best = clock - llm.end
            return
        for k, (kernels, _, due) in enumerate(chains):
            if done[k] == len(kernels):
                continue
            seconds = kernels[done[k]]
            earliest = max(clock, ready[k])
            start = next(max(a, earliest) for a, b in free if max(a, earliest) + seconds <= b + CLOSE)
            if start + seconds <= due + CLOSE:
                end = start + seconds
                extend((*done[:k], done[k] + 1, *done[k + 1 :]), (*ready[:k], end, *ready[k + 1 :]), end)

    extend((0,) * len(chains), tuple(chain[1] for chain in chains), -float(head))
    return best
