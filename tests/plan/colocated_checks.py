"""What a colocated schedule must obey, checked from its rows alone, and the best there is on tiny instances."""

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from mmtrain.plan.colocated.bubble_schedule import EncoderPlan, EncoderSchedule, LlmTimeline
from mmtrain.plan.colocated.bubbles import KernelSequence, PlacedKernels

CLOSE = 1e-5
Spans = Sequence[tuple[float, float]]
FloatArray = npt.NDArray[np.float64]


def check_schedule(found: EncoderSchedule, busy: Sequence[Spans], link: Sequence[Spans]) -> None:
    """Fail unless the schedule could run beside an LLM whose ranks compute at `busy` and communicate at `link`."""
    host, plan = found.host, found.plan
    num_microbatches = len(host.first_forwards)
    seen = {True: set[int](), False: set[int]()}
    for (pipeline, stage), forward in found.forward.items():
        backward = found.backward.get((pipeline, stage))
        rank = plan.place(pipeline, stage)
        rows = list(_rows(forward)) + (list(_rows(backward)) if backward is not None else [])
        _apart([(a, b) for a, b, computes in rows if computes], busy[rank])
        _apart([(a, b) for a, b, computes in rows if not computes], link[rank])
    for mb in range(num_microbatches):
        pipeline = int(found.owner[mb])
        way = host.transfer if plan.place(pipeline, plan.pp - 1) else 0.0
        ready = -np.inf
        for stage in range(plan.pp):
            start, end = _in_order(found.forward[pipeline, stage], mb, plan.forward[stage], plan)
            assert start >= ready - CLOSE
            assert -start <= found.head + CLOSE
            ready = end + host.transfer
        seen[True].add(mb)
        assert abs(end + way - found.forward_ends[mb]) < CLOSE
        assert end + way <= host.first_forwards[mb] + CLOSE
        ready = host.last_backwards[mb] + way
        for stage in reversed(range(plan.pp)) if plan.backward else ():
            start, end = _in_order(found.backward[pipeline, stage], mb, plan.backward[stage], plan)
            assert start >= ready - CLOSE
            assert end - host.end <= found.tail + CLOSE
            ready = end + host.transfer
    placed = [p for half in (found.forward, found.backward) for p in half.values()]
    per_microbatch = sum(len(layer.durations) for half in (plan.forward, plan.backward) for s in half for layer in s)
    kernels = sum(len({*zip(p.chains.tolist(), p.kernels.tolist(), strict=True)}) for p in placed)
    assert kernels == num_microbatches * per_microbatch, "every kernel of every microbatch, and no others"
    assert np.all(np.diff(found.forward_ends) >= 0), "the i-th to end is LLM microbatch i"
    expected = host.end + max(found.head, host.gather) + max(found.tail, host.scatter)
    assert abs(found.step_time - expected) < CLOSE


def _rows(placed: PlacedKernels) -> Iterator[tuple[float, float, bool]]:
    for (start, end), computes in zip(placed.spans.tolist(), placed.computes.tolist(), strict=True):
        yield start, end, computes


def _apart(spans: Spans, others: Spans) -> None:
    """No two of them all overlap."""
    everything = np.array(sorted([*spans, *others]))
    assert np.all(everything[:, 0] <= everything[:, 1])
    assert np.all(everything[1:, 0] >= everything[:-1, 1] - CLOSE)


def _in_order(
    placed: PlacedKernels, mb: int, layers: tuple[KernelSequence, ...], plan: EncoderPlan
) -> tuple[float, float]:
    """Each kernel as long as it should be, and none before the one in front of it; returns first start and last end."""
    mine = placed.chains == mb
    spans, which, computes = placed.spans[mine], placed.kernels[mine], placed.computes[mine]
    order = np.lexsort((spans[:, 0], which))
    spans, which, computes = spans[order], which[order], computes[order]
    assert np.all(spans[1:, 0] >= spans[:-1, 1] - CLOSE)
    durations = np.array([d for layer in layers for d in layer.durations])
    pieces = np.bincount(which, minlength=len(durations))
    spent = np.bincount(which, weights=spans[:, 1] - spans[:, 0], minlength=len(durations))
    assert pieces.min() >= 1
    assert np.allclose(spent, durations * (1 + plan.cut_cost * (pieces - 1)), atol=CLOSE)
    assert not np.any(pieces[~np.array([c for layer in layers for c in layer.cuttable])] > 1)
    assert computes.tolist() == np.array([c for layer in layers for c in layer.computes])[which].tolist()
    return float(spans[0, 0]), float(spans[-1, 1])


def least_step(host: LlmTimeline, plan: EncoderPlan) -> float:
    """The shortest step, by trying every owner, every start and every order; whole numbers, pp 1, no collectives."""
    num_pipelines, total = plan.num_pipelines(host), len(host.first_forwards)
    furthest = int(sum(k.latency for k in plan.forward[0]) * total)
    known: dict[tuple[int, tuple[int, ...], int], float] = {}

    def tail_of(pipeline: int, mine: tuple[int, ...], head: int) -> float:
        key = (pipeline, mine, head)
        if key not in known:
            known[key] = _least_tail(host, plan, pipeline, mine, head)
        return known[key]

    best = np.inf
    for owner in product(range(num_pipelines), repeat=total):
        groups = [tuple(mb for mb in range(total) if owner[mb] == k) for k in range(num_pipelines)]
        for head in range(int(host.gather), furthest + 1):
            if host.end + head + host.scatter >= best:
                break
            tail = max(tail_of(k, mine, head) for k, mine in enumerate(groups))
            best = min(best, host.end + head + max(tail, host.scatter))
    return best


def _least_tail(host: LlmTimeline, plan: EncoderPlan, pipeline: int, mine: tuple[int, ...], head: int) -> float:
    """The least time after the LLM that one rank needs when it starts `head` before it; infinite if F is missed."""
    forward = [d for k in plan.forward[0] for d in k.durations]
    backward = [d for layers in plan.backward for k in layers for d in k.durations]
    way = host.transfer if plan.place(pipeline, 0) else 0.0
    free = [(max(a, -head), b) for a, b in host.free_times[plan.place(pipeline, 0)].compute.tolist() if b > -head]
    chains = [(forward, -float(head), float(host.first_forwards[mb]) - way) for mb in mine]
    chains += [(backward, float(host.last_backwards[mb]) + way, np.inf) for mb in mine if backward]
    best = np.inf
    seen: set[tuple[tuple[int, ...], tuple[float, ...]]] = set()

    def go_on(at: tuple[int, ...], ready: tuple[float, ...], clock: float) -> None:
        nonlocal best
        state = at, tuple(max(clock, t) for t in ready)
        if clock - host.end >= best or state in seen:
            return
        seen.add(state)
        if all(a == len(c[0]) for a, c in zip(at, chains, strict=True)):
            best = clock - host.end
            return
        for k, (kernels, _, due) in enumerate(chains):
            if at[k] == len(kernels):
                continue
            seconds, earliest = kernels[at[k]], max(clock, ready[k])
            begin = next(max(a, earliest) for a, b in free if max(a, earliest) + seconds <= b + CLOSE)
            if begin + seconds <= due + CLOSE:
                now = begin + seconds
                go_on((*at[:k], at[k] + 1, *at[k + 1 :]), (*ready[:k], now, *ready[k + 1 :]), now)

    go_on((0,) * len(chains), tuple(c[1] for c in chains), -float(head))
    return best
