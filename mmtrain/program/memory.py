"""How much a rank keeps alive: activations between a forward and its backward, counted from the program itself."""

from collections import Counter
from collections.abc import Callable, Sequence

from mmtrain.program.actions import Action, Backward, Forward
from mmtrain.program.graph import Microbatch, StageGraph, StageId

BytesOf = Callable[[StageId, Microbatch], int]  # bytes one rank keeps between forward and backward


def peak_bytes(graph: StageGraph, actions: Sequence[Action], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes of activations alive on a rank, and the place in `actions` where that first happens.

    What a stage without backward computes is alive during its forward only.
    """
    live = peak = peak_at = 0
    for at, action in enumerate(actions):
        match action:
            case Forward(stage, mb):
                size = bytes_of(stage, mb)
                if live + size > peak:
                    peak, peak_at = live + size, at
                live += size if graph.needs_backward(stage) else 0
            case Backward(stage, mb):
                live -= bytes_of(stage, mb)
    return peak, peak_at


def peak_live(graph: StageGraph, actions: Sequence[Action]) -> dict[StageId, int]:
    """Return how many microbatches of each stage a rank holds alive at most (each stage's own peak)."""
    live: Counter[StageId] = Counter()
    peak: dict[StageId, int] = {}
    for action in actions:
        match action:
            case Forward(stage, _):
                live[stage] += 1
                peak[stage] = max(peak.get(stage, 0), live[stage])
                live[stage] -= not graph.needs_backward(stage)
            case Backward(stage, _):
                live[stage] -= 1
    return peak
