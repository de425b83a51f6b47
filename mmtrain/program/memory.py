"""How much a rank keeps alive: activations between a forward and its backward, counted from the program itself."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from mmtrain.program.actions import Action, Backward, Compute, Forward, Pass
from mmtrain.program.graph import Microbatch, StageGraph, StageId
from mmtrain.program.segments import begun, ended, parts

BytesOf = Callable[[StageId, Microbatch], int]  # bytes one rank keeps between forward and backward


def peak_bytes(graph: StageGraph, actions: Sequence[Action], bytes_of: BytesOf) -> tuple[int, int]:
    """Return the most bytes of activations alive on a rank, and the place in `actions` where that first happens.

    A microbatch counts in full from the first segment of its forward to the last of its backward. What a stage
    without backward computes is alive during its forward only.
    """
    live = peak = peak_at = 0
    for at, begins, whole in _borders(graph, actions):
        if begins and isinstance(whole, Forward):
            live += bytes_of(whole.stage, whole.mb)
            if live > peak:
                peak, peak_at = live, at
        if not begins and _frees(graph, whole):
            live -= bytes_of(whole.stage, whole.mb)
    return peak, peak_at


def peak_live(graph: StageGraph, actions: Sequence[Action]) -> dict[StageId, int]:
    """Return how many microbatches of each stage a rank holds alive at most (each stage's own peak)."""
    live: Counter[StageId] = Counter()
    peak: dict[StageId, int] = {}
    for _, begins, whole in _borders(graph, actions):
        if begins and isinstance(whole, Forward):
            live[whole.stage] += 1
            peak[whole.stage] = max(peak.get(whole.stage, 0), live[whole.stage])
        if not begins and _frees(graph, whole):
            live[whole.stage] -= 1
    return peak


def _borders(graph: StageGraph, actions: Sequence[Action]) -> Iterator[tuple[int, bool, Pass]]:
    """Beginnings (True) and ends (False) of forwards and backwards, with their place in `actions`."""
    for at, action in enumerate(actions):
        for part in parts(graph, action):
            if isinstance(part, Compute):
                if begins := begun(graph, part):
                    yield at, True, begins
                if ends := ended(graph, part):
                    yield at, False, ends


def _frees(graph: StageGraph, whole: Pass) -> bool:
    """Whether nothing of the microbatch is kept after it."""
    return isinstance(whole, Backward) or not graph.needs_backward(whole.stage)
