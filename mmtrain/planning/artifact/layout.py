"""Assign layers to ranks, for each placement, when meshes and layer partitions are known."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.planning.artifact.plan import Placement, SchedulePlan, StagePlan, UnitPlan, sharding_text
from mmtrain.program.ir.graph import LLM, ContextMethod, CutSequences, DispatchMode, Exchange
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe.settings.modalities import GENERATOR

NO_LAYERS: Mapping[str, Collection[int]] = {}


@dataclass(frozen=True, order=True)
class MeshSize:
    """Sizes of a unit's mesh. Prints as `tp2 pp1 dp4`, or with all that may be there as `tp2 cp2 pp2 vpp3 dp4`.

    cp_method, cp_split: how ranks share sequences where `cp` is above 1; see `UnitMesh`.
    """

    tp: int
    pp: int
    dp: int
    vpp: int = 1
    cp: int = 1
    cp_method: ContextMethod = "ulysses"
    cp_split: CutSequences = "auto"
    ep: int = 1  # replicas that hold the experts of a block together

    @property
    def num_replicas(self) -> int:
        """Copies of the unit's weights: `cp` of them share the sequences of each microbatch."""
        return self.dp * self.cp

    @property
    def ranks(self) -> int:
        """Ranks in the mesh."""
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        context = f" cp{self.cp}" if self.cp > 1 else ""
        chunks = f" vpp{self.vpp}" if self.vpp > 1 else ""
        experts = f" ep{self.ep}" if self.ep > 1 else ""
        return f"tp{self.tp}{context} pp{self.pp}{chunks} dp{self.dp}{experts}"


@dataclass(frozen=True)
class Layout:
    """A placement with meshes, ranks and stages for every unit: a plan before anything is predicted."""

    placement: Placement
    units: Mapping[str, UnitPlan]
    num_microbatches: Mapping[str, int]  # of a replica in a step, by unit
    encoder_first: bool = False  # see `StageGraph`

    @property
    def default_schedule(self) -> SchedulePlan:
        """The schedule that it runs by unless another is made for it."""
        kind: ScheduleKind = "encoder_first" if self.encoder_first else "1f1b"
        return SchedulePlan(kind=kind, num_microbatches=dict(self.num_microbatches))

    @property
    def summary(self) -> str:
        """One line for tables, such as `disaggregated: vision tp1 pp1 dp2, llm tp1 pp2 dp1`.

        Where units have different numbers of microbatches, they are appended as `mb8`.
        """
        counts = self.num_microbatches
        llm = self.units[LLM]
        if llm.is_replicated:
            size = MeshSize(llm.tp, 1, llm.dp, cp=llm.cp, ep=llm.ep)
            sharded = sharding_text(llm.shard, llm.keeps_weights)
            return replicated_summary(size, sharded, counts, llm.dispatch, llm.exchange, self.encoder_first)
        counts_differ = len(set(counts.values())) > 1
        meshes = []
        for name, unit in self.units.items():
            mesh = f"{name} {MeshSize(unit.tp, unit.pp, unit.dp, unit.vpp, unit.cp, ep=unit.ep)}"
            meshes.append(f"{mesh} mb{counts[name]}" if counts_differ else mesh)
        return f"{self.placement}: {', '.join(meshes)}"

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Sort key of equally fast layouts: fewer pipeline ranks, then fewer chunks, smaller tp, equal microbatches."""
        units = self.units.values()
        pps = [unit.pp for unit in units]
        num_pipeline_ranks = max(pps) if self.placement == "unified" else sum(pps)
        num_counts = len(set(self.num_microbatches.values()))
        return num_pipeline_ranks, max(unit.vpp for unit in units), max(unit.tp for unit in units), num_counts


def replicated_summary(
    llm: MeshSize,
    sharded: str,
    num_microbatches: Mapping[str, int],
    dispatch: DispatchMode | None,
    exchange: Exchange,
    encoder_first: bool = False,
) -> str:
    """Return one line on a layout in which every rank, or every TP group, runs every unit.

    llm: the LLM's mesh; sharded: as `sharding_text` says it.
    """
    count = num_microbatches[LLM]
    inside = "".join(f", {name} {size}" for name, size in (("tp", llm.tp), ("cp", llm.cp), ("ep", llm.ep)) if size > 1)
    text = f"replicated: {llm.ranks} ranks{inside}, {sharded}, {count} mini-batch{'' if count == 1 else 'es'}"
    if dispatch is not None:
        text += f", dispatch {dispatch}"
    if exchange != "all_to_all":
        text += f" by {exchange.replace('_', '-')}"
    if encoder_first:
        numbers = dict.fromkeys(
            str(number) for unit, number in num_microbatches.items() if unit not in (LLM, GENERATOR)
        )
        text += f", encoders first in {' and '.join(numbers)}"
    return text


def replicated_units(
    shape: ModelShape,
    llm: MeshSize,
    shard: int | None,
    dispatch: DispatchMode | None,
    exchange: Exchange,
    recompute: Mapping[str, Collection[int]] = NO_LAYERS,
    keeps_weights: bool = False,
) -> dict[str, UnitPlan]:
    """Give every TP group all layers of all units, each `shard` groups one copy of their weights, or each one (None).

    Args:
        shape: the model.
        llm: the LLM's mesh, of one pipeline rank; other units have its tensor-parallel size.
        shard: a divisor of its replicas; None: the optimizer alone is sharded (ZeRO-1).
        dispatch: what is balanced over the ranks.
        exchange: by which collective rows are dispatched.
        recompute: recomputed layers by unit.
        keeps_weights: whether they stay gathered through a step (ZeRO-2).
    """
    num_layers = sum(len(unit.layers) for unit in shape.units)
    units = unified_units(shape, llm, (0, num_layers), recompute)
    sharding = {"shard": shard, "keeps_weights": keeps_weights, "dispatch": dispatch, "exchange": exchange}
    return {name: unit.model_copy(update=sharding) for name, unit in units.items()}


def unified_units(
    shape: ModelShape,
    size: MeshSize,
    chunk_bounds: Sequence[int],
    recompute: Mapping[str, Collection[int]] = NO_LAYERS,
    tp: Mapping[str, int] | None = None,
) -> dict[str, UnitPlan]:
    """Divide all units' layers, one unit after another, into one pipeline of `size.pp * size.vpp` model chunks.

    Chunk c is on pipeline rank c % pp. A unit's mesh spans the pipeline ranks that hold layers of it, starting with its
    first layer's. The rank that holds its last layer may also hold the first layers of the next unit.

    Where the LLM's replicas share sequences, each of them is a data-parallel replica of the other units, so that the
    images of a long sample are encoded by all ranks that compute its tokens. So is each rank, or each smaller group, of
    the LLM's TP groups for a unit with a smaller tensor-parallel size.

    Args:
        shape: the model.
        size: mesh of the LLM, which spans all ranks of the pipeline.
        chunk_bounds: layers at which chunks start and end, from 0 to the number of all layers.
        recompute: recomputed layers by unit.
        tp: tensor-parallel size by unit, a divisor of the LLM's; the LLM's own where it says nothing.
    """
    units = {}
    first_layer = 0
    ranks_per_stage = size.tp * size.num_replicas
    for unit in shape.units:
        end = first_layer + len(unit.layers)
        chunks = [c for c in range(size.pp * size.vpp) if chunk_bounds[c] < end and chunk_bounds[c + 1] > first_layer]
        stage_bounds = [
            (max(chunk_bounds[c], first_layer) - first_layer, min(chunk_bounds[c + 1], end) - first_layer)
            for c in chunks
        ]
        pipeline_ranks = list(dict.fromkeys(c % size.pp for c in chunks))
        ranks = [p * ranks_per_stage + k for p in pipeline_ranks for k in range(ranks_per_stage)]
        vpp = -(-len(chunks) // len(pipeline_ranks))
        mesh = size if unit.name == LLM else mesh_beside(size, (tp or {}).get(unit.name, size.tp))
        mesh = replace(mesh, pp=len(pipeline_ranks), vpp=vpp)
        units[unit.name] = _unit_plan(mesh, ranks, stage_bounds, recompute.get(unit.name, ()))
        first_layer = end
    return units


def disaggregated_units(
    sizes: Mapping[str, MeshSize],
    stage_bounds: Mapping[str, Sequence[int]],
    recompute: Mapping[str, Collection[int]] = NO_LAYERS,
) -> dict[str, UnitPlan]:
    """Put each unit on separate ranks, one unit behind another as `first_ranks` says.

    Args:
        sizes: meshes by unit.
        stage_bounds: by unit, layers at which stages start and end, from 0 to the number of its layers.
        recompute: recomputed layers by unit.
    """
    units = {}
    for name, first_rank in first_ranks(sizes).items():
        size, bounds = sizes[name], list(pairwise(stage_bounds[name]))
        units[name] = _unit_plan(size, range(first_rank, first_rank + size.ranks), bounds, recompute.get(name, ()))
    return units


def first_ranks(sizes: Mapping[str, MeshSize]) -> dict[str, int]:
    """Return the first rank of each unit on separate ranks, by name in the order of `sizes`.

    Units lie in that order, unless a tensor-parallel group would start at a rank that its size does not divide: one
    encoder on rank 0 would push groups of the LLM over the ends of nodes. Then units with larger groups come first.
    """
    in_order = _one_behind_another(sizes, list(sizes))
    if all(first % sizes[name].tp == 0 for name, first in in_order.items()):
        return in_order
    return _one_behind_another(sizes, sorted(sizes, key=lambda name: -sizes[name].tp))


def _one_behind_another(sizes: Mapping[str, MeshSize], order: Sequence[str]) -> dict[str, int]:
    ends = accumulate((sizes[name].ranks for name in order), initial=0)
    by_name = dict(zip(order, ends, strict=False))
    return {name: by_name[name] for name in sizes}


def mesh_beside(of_llm: MeshSize, tp: int) -> MeshSize:
    """Return the mesh of another unit on the LLM's ranks, whose replicas share no sequences.

    tp: a divisor of the LLM's. With a smaller one, a TP group of the LLM holds several replicas of the unit.
    """
    return MeshSize(tp, of_llm.pp, of_llm.num_replicas * of_llm.tp // tp, of_llm.vpp)


def split_tp_group(units: Mapping[str, UnitPlan], ranks_per_node: int) -> tuple[int, ...] | None:
    """Return a tensor-parallel group whose ranks lie on different nodes, if there is one."""
    for unit in units.values():
        for first in range(0, len(unit.ranks), unit.tp):
            tp_group = unit.ranks[first : first + unit.tp]
            if tp_group[0] // ranks_per_node != tp_group[-1] // ranks_per_node:
                return tp_group
    return None


def _unit_plan(
    size: MeshSize, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], recompute: Collection[int]
) -> UnitPlan:
    stages = tuple(
        StagePlan(
            stage=i, chunk=i // size.pp, layers=(lo, hi), recompute=tuple(x for x in range(lo, hi) if x in recompute)
        )
        for i, (lo, hi) in enumerate(bounds)
    )
    context = {"cp": size.cp, "cp_method": size.cp_method, "cp_split": size.cp_split} if size.cp > 1 else {}
    return UnitPlan(
        tp=size.tp, pp=size.pp, dp=size.dp, vpp=size.vpp, ep=size.ep, ranks=tuple(ranks), stages=stages, **context
    )
