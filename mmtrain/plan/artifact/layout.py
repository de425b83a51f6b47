"""Which ranks hold which layers, for each placement, once sizes and cuts are known."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from mmtrain.models.model_shape import ModelShape
from mmtrain.plan.artifact.plan import Placement, StagePlan, UnitPlan

NO_LAYERS: Mapping[str, Collection[int]] = {}


@dataclass(frozen=True, order=True)
class MeshSize:
    """Sizes of a unit's mesh. Prints as `tp2 pp1 dp4`, with several chunks a rank as `tp2 pp2 vpp3 dp4`."""

    tp: int
    pp: int
    dp: int
    vpp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks in the mesh."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        chunks = f" vpp{self.vpp}" if self.vpp > 1 else ""
        return f"tp{self.tp} pp{self.pp}{chunks} dp{self.dp}"


@dataclass(frozen=True)
class Layout:
    """A complete placement: what a plan is before anything is predicted."""

    placement: Placement
    units: Mapping[str, UnitPlan]
    num_microbatches: Mapping[str, int]  # of each replica, by unit

    @property
    def summary(self) -> str:
        """One line for tables: `disaggregated: vision tp1 pp1 dp2, llm tp1 pp2 dp1`."""
        counts = self.num_microbatches
        return f"{self.placement}: " + ", ".join(
            f"{n} {MeshSize(u.tp, u.pp, u.dp, u.vpp)}" + (f" mb{counts[n]}" if len(set(counts.values())) > 1 else "")
            for n, u in self.units.items()
        )

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Decides between equally fast layouts: fewer pipeline ranks and chunks, then smaller tensor parallelism."""
        units, counts = self.units.values(), self.num_microbatches.values()
        pipeline = max(u.pp for u in units) if self.placement == "unified" else sum(u.pp for u in units)
        return pipeline, max(u.vpp for u in units), max(u.tp for u in units), len(set(counts))


def unified_units(
    shape: ModelShape, size: MeshSize, cuts: Sequence[int], recompute: Mapping[str, Collection[int]] = NO_LAYERS
) -> dict[str, UnitPlan]:
    """One pipeline over the line of all units' layers, cut at `cuts` into `size.pp * size.vpp` parts.

    The parts go round the pipeline ranks. A unit's mesh spans the ranks that hold layers of it, from where it begins;
    the rank where it ends may also hold the beginning of the next unit. `recompute`: layers by unit.
    """
    units, first_layer = {}, 0
    for unit in shape.units:
        end = first_layer + len(unit.layers)
        touched = [p for p in range(size.pp * size.vpp) if cuts[p] < end and cuts[p + 1] > first_layer]
        bounds = [(max(cuts[p], first_layer) - first_layer, min(cuts[p + 1], end) - first_layer) for p in touched]
        per_part = size.tp * size.dp
        places = list(dict.fromkeys(p % size.pp for p in touched))
        ranks = [place * per_part + k for place in places for k in range(per_part)]
        mesh = MeshSize(size.tp, len(places), size.dp, -(-len(touched) // len(places)))
        units[unit.name] = _unit(mesh, ranks, bounds, recompute.get(unit.name, ()))
        first_layer = end
    return units


def disaggregated_units(
    sizes: Mapping[str, MeshSize],
    cuts: Mapping[str, Sequence[int]],
    recompute: Mapping[str, Collection[int]] = NO_LAYERS,
) -> dict[str, UnitPlan]:
    """Each unit on its own ranks, one after another in the order of `sizes`; `cuts` bound its stages' layers."""
    units, first_rank = {}, 0
    for name, size in sizes.items():
        bounds = list(zip(cuts[name][:-1], cuts[name][1:], strict=True))
        units[name] = _unit(size, range(first_rank, first_rank + size.ranks), bounds, recompute.get(name, ()))
        first_rank += size.ranks
    return units


def split_tp_group(units: Mapping[str, UnitPlan], ranks_per_node: int) -> tuple[int, ...] | None:
    """A tensor-parallel group whose ranks lie on different nodes, if there is one."""
    for unit in units.values():
        for first in range(0, len(unit.ranks), unit.tp):
            tp_group = unit.ranks[first : first + unit.tp]
            if tp_group[0] // ranks_per_node != tp_group[-1] // ranks_per_node:
                return tp_group
    return None


def _unit(
    size: MeshSize, ranks: Sequence[int], bounds: Sequence[tuple[int, int]], recompute: Collection[int]
) -> UnitPlan:
    stages = tuple(
        StagePlan(
            stage=i, chunk=i // size.pp, layers=(lo, hi), recompute=tuple(x for x in range(lo, hi) if x in recompute)
        )
        for i, (lo, hi) in enumerate(bounds)
    )
    return UnitPlan(tp=size.tp, pp=size.pp, dp=size.dp, vpp=size.vpp, ranks=tuple(ranks), stages=stages)
