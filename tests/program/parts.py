"""Strategies for programs whose forwards and backwards run in parts, some of them in the gaps of others."""

from dataclasses import replace
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from mmtrain.program import Program, StageGraph, build_1f1b, build_coarse, lower
from mmtrain.program.ir.actions import Compute, ComputeTask, Fill, Forward, Partial
from mmtrain.program.ir.segments import num_segments
from tests.program.graphs import Unit, chain, graphs, unified


@st.composite
def cut_programs(draw: st.DrawFn, max_n: int = 3, inside_layers: bool = False) -> Program:
    """Draw 1F1B or coarse orders in which some passes are cut into parts, one after another; all of them run."""
    graph = deeper(draw(graphs(max_n=max_n)), draw(st.integers(1, 4)))
    if inside_layers:
        graph = in_pieces(graph)
    program = draw(st.sampled_from([build_1f1b, build_coarse]))(graph)
    seed = draw(st.integers(0, 2**32))
    pieces = {rank: [p for a in todo for p in cut(graph, a, seed)] for rank, todo in program.actions.items()}
    return lower(Program(graph, {rank: tuple(todo) for rank, todo in pieces.items()}))


@st.composite
def filled_programs(draw: st.DrawFn, max_n: int = 3) -> Program:
    """Draw units on the same ranks, with some parts in a gap of the action before them; not all of these run."""
    pp, tp, n = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, max_n))
    frozen = draw(st.booleans())
    ranks = tuple(range(pp * tp))
    encoder = Unit("vision", dp=pp, tp=tp, ranks=ranks, trainable=(not frozen,))
    shared = draw(st.sampled_from([unified(pp, 1, tp, n=n), chain(encoder, Unit("llm", pp, tp=tp, ranks=ranks), n=n)]))
    graph = deeper(shared, draw(st.integers(2, 4)))
    program = draw(st.sampled_from([build_1f1b, build_coarse]))(graph)
    seed = draw(st.integers(0, 2**32))
    return lower(Program(graph, {rank: fill(graph, todo, seed) for rank, todo in program.actions.items()}))


def deeper(graph: StageGraph, num_layers: int) -> StageGraph:
    """Return the same graph with `num_layers` layers in every stage."""
    stages = (
        replace(
            s,
            layers=(s.id.index * num_layers, (s.id.index + 1) * num_layers),
            bucket_starts=tuple(start for start in s.bucket_starts if start < num_layers),
        )
        for s in graph.stages
    )
    return replace(graph, stages=tuple(stages))


def in_pieces(graph: StageGraph) -> StageGraph:
    """Return the same graph with one layer in every stage, in as many pieces as the stage had layers."""
    stages = (
        replace(
            s,
            layers=(s.id.index, s.id.index + 1),
            pieces=(s.layers[1] - s.layers[0],),
            bucket_starts=(0,),
        )
        for s in graph.stages
    )
    return replace(graph, stages=tuple(stages))


def cut(graph: StageGraph, action: Compute, seed: int, always: bool = False) -> list[Compute]:
    """Cut half of all actions between random segments, alike on every rank; with `always` every action."""
    lo = 0
    hi = num_segments(graph, action.stage)
    chance = _chance(seed, action)
    if isinstance(action, Partial) or (not always and chance.random() < 0.5):
        return [action]
    borders = [b for b in range(1, hi - lo) if chance.random() < 0.5]
    kind = "F" if isinstance(action, Forward) else "B"
    pieces = [Partial(action.stage, action.mb, kind, a, b) for a, b in pairwise([0, *borders, hi - lo])]
    return pieces if kind == "F" else pieces[::-1]


def fill(graph: StageGraph, todo: tuple[Compute, ...], seed: int) -> tuple[ComputeTask, ...]:
    """Put actions into a gap of the action of another unit before them, mostly if their microbatches differ."""
    out: list[ComputeTask] = []
    rest = list(todo)
    while rest:
        action = rest.pop(0)
        total = num_segments(graph, action.stage)
        chance = _chance(seed, action)
        guest = rest and rest[0].stage.unit != action.stage.unit and total > 1
        if guest and chance.random() < (0.6 if rest[0].mb.index != action.mb.index else 0.05):
            gap = chance.randrange(1, total)
            inside = cut(graph, rest.pop(0), seed, always=True)
            out.append(Fill(action, gap, tuple(p for p in inside if isinstance(p, Partial))))
        else:
            out += cut(graph, action, seed)
    return tuple(out)


def _chance(seed: int, action: Compute) -> Random:
    return Random(f"{seed} {type(action)} {action.stage} {action.mb.index}")
