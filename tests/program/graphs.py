"""Stage graphs for tests: chains of units on ranks, and a hypothesis strategy over many of them."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from mmtrain.program.ir.graph import Edge, Stage, StageGraph, StageId, UnitMesh


@dataclass(frozen=True)
class Unit:
    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    trainable: tuple[bool, ...] = ()  # per stage; all if empty
    ranks: tuple[int, ...] = ()  # the next free ranks if empty
    num_stages: int = 0  # one for each pipeline rank if 0; more are model chunks
    n: int = 0  # microbatches of a replica; as many as the chain has if 0


def chain(*units: Unit, n: int = 2, tied: bool = False) -> StageGraph:
    """Return a graph in which units feed the LLM, or without it the last unit, and the LLM feeds units after it.

    A stage has two layers.
    """
    meshes, stages, edges = [], [], []
    free = 0
    for u in units:
        ranks = u.ranks or tuple(range(free, free + u.pp * u.dp * u.tp))
        free = max(free, max(ranks) + 1)
        num_stages = u.num_stages or u.pp
        mesh = UnitMesh(u.name, u.tp, u.pp, u.dp, ranks, u.n or n, -(-num_stages // u.pp))
        meshes.append(mesh)
        trainable = u.trainable or (True,) * num_stages
        for k in range(num_stages):
            tp_groups = tuple(mesh.tp_group(k, r) for r in range(u.dp))
            stages.append(Stage(StageId(u.name, k), (2 * k, 2 * k + 2), tp_groups, trainable[k]))
            if k:
                edges.append(Edge(StageId(u.name, k - 1), StageId(u.name, k)))
    names = [u.name for u in units]
    middle = names.index("llm") if "llm" in names else len(names) - 1
    ends = [StageId(u.name, (u.num_stages or u.pp) - 1) for u in units]
    edges += [Edge(end, StageId(names[middle], 0)) for end in ends[:middle]]
    edges += [Edge(ends[middle], StageId(name, 0)) for name in names[middle + 1 :]]
    return StageGraph(tuple(meshes), tuple(stages), tuple(edges), tied)


def unified(
    pp: int, dp: int = 1, tp: int = 1, vision_pp: int = 1, n: int = 2, vision_n: int = 0, **more: object
) -> StageGraph:
    """Return a graph with vision on the first `vision_pp` pipeline ranks, and the LLM from the last of these on."""
    per_stage = dp * tp
    all_ranks = tuple(range(pp * per_stage))
    vision = Unit("vision", vision_pp, dp, tp, ranks=all_ranks[: vision_pp * per_stage], n=vision_n)
    first = vision_pp - 1
    llm = Unit("llm", pp - first, dp, tp, ranks=all_ranks[first * per_stage :])
    return chain(vision, llm, n=n, **more)  # type: ignore[arg-type]


@st.composite
def counts(draw: st.DrawFn, max_n: int) -> int:
    """Draw a unit's number of microbatches; 0 stands for that of the chain."""
    return draw(st.integers(1, max_n)) if draw(st.booleans()) else 0


@st.composite
def graphs(draw: st.DrawFn, max_n: int = 4, max_dp: int = 3) -> StageGraph:
    """Draw text-only, unified, disaggregated and overlapping graphs with encoders, a generator and frozen stages.

    Units may have microbatches of their own number, and stages one bucket for each of their two layers.
    """
    graph = draw(graphs_of_one_bucket(max_n, max_dp))
    return with_buckets(graph, {s.id for s in graph.stages if draw(st.booleans())})


def with_buckets(graph: StageGraph, stages: Collection[StageId] | None = None) -> StageGraph:
    """Return the graph with a bucket for each layer of some stages, or of all."""
    return replace(
        graph,
        stages=tuple(
            replace(s, bucket_starts=tuple(range(s.layers[1] - s.layers[0]))) if stages is None or s.id in stages else s
            for s in graph.stages
        ),
    )


@st.composite
def graphs_of_one_bucket(draw: st.DrawFn, max_n: int, max_dp: int) -> StageGraph:
    """Draw what `graphs` does, each stage with one bucket."""
    n = draw(st.integers(1, max_n))
    tied = draw(st.booleans())
    small = st.integers(1, 2)
    shapes = ["text", "unified", "disaggregated", "two encoders", "generator", "alternating", "spread"]
    shape = draw(st.sampled_from(shapes))
    if shape == "unified":
        pp = draw(st.integers(1, 3))
        vision_n = draw(counts(max_n))
        return unified(pp, draw(small), draw(small), draw(st.integers(1, pp)), n, tied=tied, vision_n=vision_n)
    if shape == "alternating":  # both units on the same ranks, so that the path visits each rank twice
        pp, dp = draw(st.integers(2, 3)), draw(small)
        ranks = tuple(range(pp * dp))
        vision = Unit("vision", pp, dp, ranks=ranks, n=draw(counts(max_n)))
        return chain(vision, Unit("llm", pp, dp, ranks=ranks), n=n, tied=tied)
    if shape == "spread":  # one LLM TP group whose ranks each hold an encoder replica, or the reverse
        ranks = (0, 1)
        wide, long = Unit("vision", dp=2, ranks=ranks), Unit("llm", tp=2, ranks=ranks)
        if draw(st.booleans()):
            wide, long = Unit("vision", tp=2, ranks=ranks), Unit("llm", dp=2, ranks=ranks)
        return chain(replace(wide, n=draw(counts(max_n))), long, n=n, tied=tied)

    def unit(name: str) -> Unit:
        pp = draw(st.integers(1, 3 if name == "llm" else 2))
        num_stages = draw(st.integers(pp, 3 * pp)) if draw(st.booleans()) else pp
        trainable = tuple(draw(st.booleans()) for _ in range(num_stages))
        num_microbatches = 0 if name == "llm" else draw(counts(max_n))
        return Unit(
            name, pp, draw(st.integers(1, max_dp)), draw(small), trainable, num_stages=num_stages, n=num_microbatches
        )

    names = {
        "text": ["llm"],
        "disaggregated": ["vision", "llm"],
        "two encoders": ["vision", "audio", "llm"],
        "generator": ["vision", "llm", "generator"],
    }[shape]
    return chain(*(unit(name) for name in names), n=n, tied=tied)
