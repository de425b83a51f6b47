"""Cells of the master test: feasible combinations of placement, mesh, model and training settings.

`CELLS` is fixed: from a pool sampled with a fixed seed, the cells that together show the most pairs of values on the
fewest ranks. So is `KIND_CELLS`, whose models have the blocks of published families: for pairs with kinds of blocks.
`python -m tests.flow.cells` prints all as a table. With `cells` hypothesis samples, and shrinks what fails; its samples
depend on its version and on the constants of the imported modules.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, product
from random import Random
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np
from hypothesis import strategies as st

from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.planning import Plan, stage_graph
from mmtrain.planning.artifact import layout as layouts
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.program import Microbatch, StageGraph, StageId
from mmtrain.program.ir.graph import ContextMethod, CutSequences
from mmtrain.recipe import Recipe
from mmtrain.recipe.checks.context_checks import context_methods
from tests.flow.cases import AUDIO, FINE, SAMPLES, Mesh, Order, plan, recipe

T = TypeVar("T")
Placement = Literal["unified", "disaggregated", "coarse", "explicit"]  # the last two are both colocated
PLACEMENTS: tuple[Placement, ...] = ("unified", "disaggregated", "coarse", "explicit")
MAX_RANKS = 8
POOL_SIZE = 120  # cells of each placement to choose from
CELLS_PER_PLACEMENT = 11
QUICK_CELLS_PER_PLACEMENT = 2  # in `make test`, which shows most values of most axes; all cells show every one
KIND_CELLS_PER_PLACEMENT = 9
LLM_LAYERS = 5  # embedding, three blocks, head
ENCODER_LAYERS = 4  # first layer, two blocks, projector; of every encoder

# Encoders of a model; `fine` is a second one of images.
ENCODERS = (("vision",), ("vision", "audio"), ("vision", "fine"))

# Vision's replicas to the LLM's.
RATIOS = ((1, 1), (2, 2), (1, 2), (2, 1), (2, 3), (3, 2), (4, 1))
FROZEN: dict[str, dict[str, Any]] = {
    "none": {},
    "vision": {"model__vision__freeze": True},
    "llm": {"model__llm__freeze": True},
    "ends": {"train__freeze": ("vision.layers.[01].*", "llm.layers.[04].*")},
    "parts": {"train__freeze": ("*norm.weight", "llm.layers.2.*", "vision.layers.2.mlp.*")},
}
# Adapters on every linear, beside parameters that train fully; apart from `FROZEN`, since cells are sampled from that.
ADAPTERS = "adapters"
ADAPTED: dict[str, Any] = {
    "train__lora": {"rank": 2, "alpha": 8.0, "targets": ("*",), "also_train": ("vision.projector.linear_1.*",)}
}
DROPPING: dict[str, Any] = {"train__lora": ADAPTED["train__lora"] | {"dropout": 0.3}}
RECOMPUTED = {"none": (), "all": (0, 1, 2, 3, 4), "some": (1, 3)}
PLAIN = "plain"
# What published families have in their blocks, beside the plain ones of `tests.flow.cases`.
LLM_KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "windows, growing queries": {
        "window": 5,
        "full_attention_blocks": (1,),
        "query_growth": 0.4,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 2,
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_positions": 3,
        },
    },
    "qk norm": {"qk_norm": True, "head_dim": 8, "qkv_bias": False},  # heads are together wider than the stream
    "m-rope": {"rope_sections": (1, 1, 1)},
    "gemma": {
        "window": 4,
        "full_attention_blocks": (2,),
        "window_rope_base": 100.0,
        "qk_norm": True,
        "query_scale": 5.0,
        "post_norms": True,
        "zero_centered_norms": True,
        "scale_embeddings": True,
        "mlp": "geglu",
        "tie_embeddings": True,
    },
}
VISION_KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "windows": {
        "positions": "rotary",
        "window": 4,
        "full_attention_blocks": (1,),
        "gated_mlp": True,
        "activation": "silu",
        "norm": "rms",
    },
    "layer scale": {"layer_scale": True, "qk_norm": True},
    "pixtral": {
        "positions": "rotary",
        "rotary_frequencies": "alternating",
        "gated_mlp": True,
        "activation": "silu",
        "norm": "rms",
        "linear_bias": False,
        "pre_norm": True,
        "downsample": "linear",
        "merge": 2,
        "projector": {"bias": False, "norm_eps": 1e-4},
    },
}


@dataclass(frozen=True)
class Context:
    """How `cp` ranks share sequences."""

    cp: int
    method: ContextMethod = "ulysses"
    split: CutSequences = "auto"

    def __str__(self) -> str:
        return f"cp{self.cp} {self.method}" + " even" * (self.split == "even")


NOT_SHARED = Context(1)


@dataclass(frozen=True)
class Size:
    """A unit's mesh in one word, like `tp2s pp2x2 dp1 n4`: s for slices of tokens, x2 for two chunks a rank.

    Ranks that share sequences (cp) are named with their method, and with `even` where all sequences are cut.
    """

    tp: int
    sp: bool
    pp: int
    vpp: int
    dp: int
    n: int
    context: Context = NOT_SHARED

    @property
    def ranks(self) -> int:
        return self.tp * self.context.cp * self.pp * self.dp

    def __str__(self) -> str:
        slices, chunks = "s" * self.sp, f"x{self.vpp}" * (self.vpp > 1)
        context = f" {self.context}" if self.context.cp > 1 else ""
        return f"tp{self.tp}{slices}{context} pp{self.pp}{chunks} dp{self.dp} n{self.n}"


@dataclass(frozen=True)
class Cell:
    """One combination. `sizes`: of every unit, the LLM's last; in `unified` all units are on the LLM's ranks."""

    placement: Placement
    sizes: tuple[tuple[str, Size], ...]
    texts_between: bool
    frozen: str
    recompute: str
    seed: int  # of where stages end, and of an explicit order
    llm_kind: str = PLAIN
    vision_kind: str = PLAIN
    tp_chunks: int = 1  # of the tokens in units with tensor parallelism

    def __str__(self) -> str:
        units = " | ".join(f"{unit} {size}" for unit, size in self.sizes)
        texts = ", texts between" * self.texts_between
        kinds = "".join(f", {axis}: {kind}" for axis, kind in self.kinds.items())
        chunks = f", {self.tp_chunks} chunks" * (self.tp_chunks > 1)
        return f"{self.placement}: {units}; frozen {self.frozen}, recompute {self.recompute}{texts}{kinds}{chunks}"

    @property
    def kinds(self) -> dict[str, object]:
        """Axes of models with other blocks than plain ones."""
        kinds = {"llm kind": self.llm_kind, "vision kind": self.vision_kind}
        return {axis: kind for axis, kind in kinds.items() if kind != PLAIN}

    @cached_property
    def axes(self) -> dict[str, object]:
        """The value of every axis that this cell has."""
        sizes = dict(self.sizes)
        found: dict[str, object] = {
            "placement": self.placement,
            "encoders": tuple(unit for unit in sizes if unit != "llm"),
            "texts between": self.texts_between,
            "frozen": self.frozen,
            "recompute": self.recompute,
            "dp ratio": self.ratio,
            "llm dp": sizes["llm"].dp,
            "llm n": sizes["llm"].n,
            "sharded optimizer": any(size.dp * size.context.cp > 1 for size in sizes.values()),
            "microbatches": "/".join(sorted({_compared(s.n, sizes["llm"].n) for s in sizes.values()})),
        }
        context = sizes["llm"].context
        found["llm cp"] = (context.cp, context.method)
        if context.cp > 1:
            found["cut sequences"] = context.split
        for unit, size in self.sizes:
            found |= {f"{unit} tp": (size.tp, size.sp), f"{unit} pp": size.pp, f"{unit} vpp": size.vpp}
        return found | self.kinds

    @property
    def ratio(self) -> str:
        """Vision's replicas to the LLM's, without common factors."""
        sizes = dict(self.sizes)
        ratio = np.array([sizes["vision"].dp, sizes["llm"].dp])
        return "{}:{}".format(*ratio // np.gcd.reduce(ratio))

    @property
    def num_ranks(self) -> int:
        """Processes that the cell takes."""
        sizes = [size.ranks for _, size in self.sizes]
        return sum(sizes) if self.placement == "disaggregated" else sizes[-1]

    def recipe(self) -> Recipe:
        """The tiny recipe with this cell's model and training settings."""
        sizes = dict(self.sizes)
        second = {"model__audio": AUDIO} if "audio" in sizes else {}
        if "fine" in sizes:
            second = {"model__encoders": {"fine": FINE}}
        kinds = {"llm": LLM_KINDS[self.llm_kind], "vision": VISION_KINDS[self.vision_kind]}
        changes = (
            second
            | {f"model__{unit}__{name}": value for unit, kind in kinds.items() for name, value in kind.items()}
            | (FROZEN | {ADAPTERS: ADAPTED})[self.frozen]
            | {"train__global_batch": sizes["llm"].n * sizes["llm"].dp}
        )
        if self.seed % 2:
            changes |= {f"parallel__{unit}__recompute_activation_function": True for unit in ("vision", "llm")}
        if self.seed % 4 == 3:
            changes |= {f"parallel__{unit}__recompute": "selective" for unit in ("vision", "llm")}
        if offload := {1: "inputs", 2: "all"}.get(self.seed % 4):
            changes |= {f"parallel__{unit}__offload": offload for unit in ("vision", "llm")}
        return recipe(**changes)

    def plan(self) -> Plan:
        """The plan that puts the units where the cell says."""
        settings = self.recipe()
        rng, model = np.random.default_rng(self.seed), build_model_shape(settings)
        meshes = _unified(self, model, rng) if self.placement == "unified" else _own_meshes(self, model, rng)
        match self.placement:
            case "explicit":
                graph = stage_graph(plan(settings, "coarse", **meshes), model)
                return plan(settings, "explicit", any_order(graph, rng), **meshes)
            case "coarse":
                return plan(settings, "coarse", **meshes)
        return plan(settings, "1f1b", **meshes)


def _compared(n: int, wanted: int) -> str:
    return "equal" if n == wanted else "merged" if n < wanted else "split"


# What is feasible --------------------------------------------------------------------------------------------------


class Choose(Protocol):
    """Picks one of the options."""

    def __call__(self, options: Sequence[T], /) -> T: ...


@st.composite
def cells(draw: st.DrawFn, placement: Placement) -> Cell:
    """Combinations of at most eight ranks that fit together."""

    def choose(options: Sequence[T]) -> T:
        return draw(st.sampled_from(options))

    return _with_kinds(_cell(placement, choose), choose)


def sample_cells(placement: Placement, count: int, kinds: bool = False) -> tuple[Cell, ...]:
    """Sample distinct combinations, as `cells` does, but equal in every run; `kinds`: not of plain blocks alone."""
    choose = Random(placement).choice
    distinct: dict[Cell, None] = {}
    while len(distinct) < count:
        cell = _cell(placement, choose)
        distinct[_with_kinds(cell, choose) if kinds else cell] = None
    return tuple(distinct)


def _with_kinds(cell: Cell, choose: Choose) -> Cell:
    """Give the cell's model any kinds of blocks; places of images are those of one encoder alone."""
    has_second = "fine" in dict(cell.sizes)
    llm_kinds = [kind for kind in LLM_KINDS if kind != "m-rope" or not has_second]
    llm = dict(cell.sizes)["llm"]
    if llm.context.method == "ring":  # keys and values cannot go round for blocks with windows
        llm_kinds = [kind for kind in llm_kinds if "ring" in _methods(llm.tp, llm.context.cp, kind)]
    return replace(cell, llm_kind=choose(llm_kinds), vision_kind=choose(list(VISION_KINDS)))


@cache
def _methods(tp: int, cp: int, llm_kind: str = PLAIN) -> tuple[ContextMethod, ...]:
    """Return by which methods the LLM may share sequences."""
    kind = {f"model__llm__{name}": value for name, value in LLM_KINDS[llm_kind].items()}
    return context_methods(recipe(**kind), tp, cp)


def _cell(placement: Placement, choose: Choose) -> Cell:
    encoders = choose(ENCODERS)
    sizes = {"unified": _one_size, "disaggregated": _sizes_apart}.get(placement, _sizes_on_top)(choose, encoders)
    texts, frozen, recompute = choose([False, True]), choose(list(FROZEN)), choose(list(RECOMPUTED))
    return Cell(placement, tuple(sizes.items()), texts, frozen, recompute, choose(range(1000)))


def _one_size(choose: Choose, encoders: Sequence[str]) -> dict[str, Size]:
    """Unified: one size for all units, which pass through one pipeline."""
    dp = choose((1, 2, 4))
    llm = choose(_with_context(_sizes(dp, _counts(dp), MAX_RANKS, 8), MAX_RANKS, choose))
    size = replace(llm, dp=llm.dp * llm.context.cp, context=NOT_SHARED)
    return dict.fromkeys(encoders, size) | {"llm": llm}


def _sizes_apart(choose: Choose, encoders: Sequence[str]) -> dict[str, Size]:
    """Disaggregated: sizes that leave enough ranks for those that follow."""
    vision_dp, llm_dp = choose(RATIOS)
    dp = {"vision": vision_dp, "llm": llm_dp} | dict.fromkeys(("audio", "fine"), choose((1, llm_dp)))
    n = choose(_counts(llm_dp))
    left, after = MAX_RANKS, ["llm", *encoders]
    sizes = {}
    for unit in ("llm", *encoders):
        after.remove(unit)
        layers = LLM_LAYERS if unit == "llm" else ENCODER_LAYERS
        counts = (n,) if unit == "llm" else (n, n, 2 * n) + (n // 2,) * (n % 2 == 0)
        max_ranks = left - sum(dp[u] for u in after)
        possible = _sizes(dp[unit], counts, max_ranks, layers)
        sizes[unit] = choose(_with_context(possible, max_ranks, choose) if unit == "llm" else possible)
        left -= sizes[unit].ranks
    return {unit: sizes[unit] for unit in (*encoders, "llm")}


def _sizes_on_top(choose: Choose, encoders: Sequence[str]) -> dict[str, Size]:
    """Colocated: pp_enc divides pp_llm, tp_enc tp_llm, and an encoder's replicas fill all ranks of the LLM's."""
    dp = choose((1, 2))
    llm = choose([s for s in _sizes(dp, _counts(dp), MAX_RANKS, LLM_LAYERS) if s.ranks > 1])
    sizes = {}
    for unit in encoders:
        possible = [
            Size(tp, sp, pp, vpp, llm.ranks // (tp * pp), llm.n)
            for tp, sp, pp, vpp in _meshes(ENCODER_LAYERS)
            if llm.tp % tp == 0 and llm.pp % pp == 0
        ]
        sizes[unit] = choose(possible)
    return sizes | {"llm": llm}


def _with_context(sizes: Sequence[Size], max_ranks: int, choose: Choose) -> Sequence[Size]:
    """Let ranks share sequences in one of the ways, where that leaves a mesh, or in none."""
    cp = choose((1, 2, 4))
    if cp == 1:
        return sizes
    context = Context(cp, choose(get_args(ContextMethod)), choose(get_args(CutSequences)))
    shared = [replace(size, context=context) for size in sizes]
    return [size for size in shared if size.ranks <= max_ranks and context.method in _methods(size.tp, cp)] or sizes


def _sizes(dp: int, counts: Iterable[int], max_ranks: int, layers: int) -> list[Size]:
    found = [Size(tp, sp, pp, vpp, dp, n) for (tp, sp, pp, vpp), n in product(_meshes(layers), counts)]
    return [size for size in found if size.ranks <= max_ranks]


def _meshes(layers: int) -> Iterator[tuple[int, bool, int, int]]:
    """Sizes whose last round over the ranks has at least one stage, of one layer at least."""
    for (tp, sp), pp, vpp in product(((1, False), (2, False), (2, True)), (1, 2, 4), (1, 2)):
        if (vpp - 1) * pp + 1 <= layers and pp <= layers:
            yield tp, sp, pp, vpp


def _counts(dp: int) -> tuple[int, ...]:
    """Microbatches of an LLM replica: every group has a sample."""
    return tuple(n for n in (1, 2, 3, 4) if n * dp <= len(SAMPLES))


# Where the layers go -----------------------------------------------------------------------------------------------


def _unified(cell: Cell, model: ModelShape, rng: np.random.Generator) -> dict[str, Mesh]:
    size = cell.sizes[-1][1]
    num_layers = sum(len(unit.layers) for unit in model.units)
    cuts = _bounds(num_layers, size.pp * size.vpp, rng)
    context = size.context
    whole = MeshSize(size.tp, size.pp, size.dp, size.vpp, context.cp, context.method, context.split)
    units = layouts.unified_units(model, whole, cuts)
    return {
        name: Mesh(
            tuple(stage.layers[0] for stage in unit.stages[1:]),
            unit.ranks,
            unit.tp,
            unit.dp,
            unit.vpp,
            RECOMPUTED[cell.recompute],
            size.sp,
            cp=unit.cp,
            method=context.method,
            split=context.split,
            tp_chunks=cell.tp_chunks if size.tp > 1 else 1,
        )
        for name, unit in units.items()
    }


def _own_meshes(cell: Cell, model: ModelShape, rng: np.random.Generator) -> dict[str, Mesh]:
    sizes, first = dict(cell.sizes), 0
    meshes = {}
    for unit, size in sizes.items():
        if cell.placement == "disaggregated":
            ranks, first = tuple(range(first, first + size.ranks)), first + size.ranks
        else:
            ranks = _on_top(size, sizes["llm"])
        layers = len(model.unit(unit).layers)
        cuts = _bounds(layers, min(size.pp * size.vpp, layers), rng)[1:-1]
        meshes[unit] = Mesh(
            cuts,
            ranks,
            size.tp,
            size.dp,
            size.vpp,
            RECOMPUTED[cell.recompute],
            size.sp,
            size.n,
            cp=size.context.cp,
            method=size.context.method,
            split=size.context.split,
            tp_chunks=cell.tp_chunks if size.tp > 1 else 1,
        )
    return meshes


def _on_top(size: Size, llm: Size) -> tuple[int, ...]:
    """Ranks of a colocated encoder: each LLM replica's ranks fall into blocks of pp x tp, a replica on each."""
    grid = np.arange(llm.ranks).reshape(llm.pp // size.pp, size.pp, llm.dp, llm.tp // size.tp, size.tp)
    return tuple(grid.transpose(1, 2, 0, 3, 4).ravel().tolist())


def _bounds(num_layers: int, num_parts: int, rng: np.random.Generator) -> tuple[int, ...]:
    cuts = rng.choice(np.arange(1, num_layers), num_parts - 1, replace=False)
    return (0, *sorted(cuts.tolist()), num_layers)


def any_order(graph: StageGraph, rng: np.random.Generator) -> Order:
    """Any order that runs: of all that is ready, one forward or backward after the other, by lot.

    Read along one rank it is a strange schedule, but a possible one, since nothing comes before what it waits for.
    """
    waits: dict[tuple[str, StageId, Microbatch], set[tuple[str, StageId, Microbatch]]] = {}
    for stage in graph.stages:
        mesh = graph.mesh(stage.id.unit)
        for replica, index in product(range(mesh.dp // graph.num_groups), range(mesh.num_microbatches)):
            mb = Microbatch(mesh.unit, replica, index)
            sources = {("F", e.src, m) for e in graph.inputs(stage.id) for m in graph.sources(e, mb)}
            returned = {("B", e.dst, m) for e in graph.outputs(stage.id) for m in graph.destinations(e, mb)}
            waits["F", stage.id, mb], waits["B", stage.id, mb] = sources, returned | {("F", stage.id, mb)}
    order: dict[int, list[str]] = {}
    done: set[tuple[str, StageId, Microbatch]] = set()
    while waits:
        ready = [action for action, before in waits.items() if before <= done]
        kind, stage, mb = action = ready[rng.integers(len(ready))]
        del waits[action]
        done.add(action)
        for rank in graph.tp_group(stage, mb.replica):
            order.setdefault(rank, []).append(f"{kind} {stage} {mb}")
    return {rank: tuple(lines) for rank, lines in order.items()}


# Which cells run -------------------------------------------------------------------------------------------------


Pair = tuple[object, ...]


def all_pairs(cell: Cell) -> tuple[Pair, ...]:
    """Return the pairs of values that a cell shows."""
    return tuple(combinations(cell.axes.items(), 2))


def pairs_with_kinds(cell: Cell) -> tuple[Pair, ...]:
    """Return those pairs of which one value is a kind of blocks."""
    kinds = cell.kinds.items()
    return tuple((kind, value) for kind in kinds for value in cell.axes.items() if kind != value)


def choose_cells(
    pools: Mapping[Placement, Sequence[Cell]],
    count: int,
    pairs_of: Callable[[Cell], tuple[Pair, ...]] = all_pairs,
) -> tuple[Cell, ...]:
    """Choose from each placement in turn the cell that shows most new pairs of values per rank.

    A pair that was shown k times counts 0.125**k.
    """
    left = {p: {cell: pairs_of(cell) for cell in pool} for p, pool in pools.items()}
    seen: Counter[Pair] = Counter()
    chosen = []
    for _, placement in product(range(count), pools):
        pairs = left[placement]
        best = max(pairs, key=lambda cell: sum(0.125 ** seen[p] for p in pairs[cell]) / (2 + cell.num_ranks))
        seen.update(pairs.pop(best))
        chosen.append(best)
    return tuple(chosen)


CELLS = choose_cells({placement: sample_cells(placement, POOL_SIZE) for placement in PLACEMENTS}, CELLS_PER_PLACEMENT)
QUICK_CELLS = CELLS[: QUICK_CELLS_PER_PLACEMENT * len(PLACEMENTS)]
KIND_CELLS = choose_cells(
    {placement: sample_cells(placement, POOL_SIZE, kinds=True) for placement in PLACEMENTS},
    KIND_CELLS_PER_PLACEMENT,
    pairs_with_kinds,
)
_TP = Size(2, True, 1, 1, 1, 2)
_PP = Size(1, False, 2, 2, 1, 2)
QUICK_KIND_CELLS = (
    Cell("coarse", (("vision", _TP), ("llm", _TP)), False, "none", "all", 1, "gemma", "windows"),
    Cell("unified", (("vision", _PP), ("llm", _PP)), False, "none", "some", 2, "m-rope", "layer scale"),
)


def main() -> None:
    """Print the cells, and how often each value of each axis occurs."""
    for cell in (*CELLS, *KIND_CELLS):
        print(f"{cell.num_ranks} ranks  {cell}")
    counts = Counter(item for cell in (*CELLS, *KIND_CELLS) for item in cell.axes.items())
    for axis in dict.fromkeys(axis for axis, _ in counts):
        values = {str(value): count for (name, value), count in counts.items() if name == axis}
        print(f"{axis}: " + ", ".join(f"{value} {count}" for value, count in sorted(values.items())))


if __name__ == "__main__":
    main()
