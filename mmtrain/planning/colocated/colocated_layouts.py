"""Enumerate colocated meshes, and lay a model out on them: the other units on the LLM's ranks, on their own meshes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from math import ceil

import numpy as np

from mmtrain.planning.artifact.layout import Layout, MeshSize
from mmtrain.planning.artifact.plan import StagePlan, UnitPlan
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import division_masks
from mmtrain.planning.layer_costs.min_max_partition import min_max_partition
from mmtrain.planning.space.constraints import UnitChoices
from mmtrain.planning.space.sample_batches import num_microbatches_of
from mmtrain.program.ir.graph import LLM


def llm_mesh_sizes(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[MeshSize]:
    """Return the meshes of the LLM on all ranks that have bubbles, with one chunk per pipeline rank.

    A replica on one rank has no bubbles: that is `unified`. Where the recipe fixes vpp, there are enough layers for it.
    """
    llm = choices[LLM]
    for size in llm.with_experts(llm.meshes(world_size)):
        vpp = llm.fixed_vpp_on(size.pp) or 1
        has_bubbles = size.tp * size.pp > 1
        can_interleave = vpp == 1 or (size.pp > 1 and size.pp * vpp <= llm.num_layers)
        if has_bubbles and can_interleave and llm.allows_chunks(size.pp, vpp):
            yield size


def other_mesh_sizes(choices: Mapping[str, UnitChoices], llm: MeshSize) -> Iterator[dict[str, MeshSize]]:
    """Return the meshes of all other units on an LLM's ranks: tp and pp divide the LLM's, and replicas fill all ranks.

    Encoders and a generator have no ranks of their own in this placement.
    """
    others = [unit for name, unit in choices.items() if name != LLM]
    for sizes in product(*(_sizes_on_llm(unit, llm) for unit in others)):
        yield dict(zip([unit.name for unit in others], sizes, strict=True))


def _sizes_on_llm(unit: UnitChoices, llm: MeshSize) -> list[MeshSize]:
    """Return the meshes of one unit on an LLM's ranks; it has one stage per rank, so vpp is 1."""
    sizes = [MeshSize(tp, pp, llm.ranks // (tp * pp)) for tp in unit.tp for pp in unit.pp]
    return [
        size
        for size in sizes
        if llm.tp % size.tp == 0 and llm.pp % size.pp == 0 and size.dp in unit.dp and unit.allows_chunks(size.pp, 1)
    ]


def merged_microbatch_counts(
    choices: Mapping[str, UnitChoices],
    others: Mapping[str, MeshSize],
    llm: MeshSize,
    merged_microbatches: Iterable[int],
) -> list[dict[str, int]]:
    """Return smaller numbers of microbatches of the other units' replicas that are worth simulating, by unit.

    An LLM replica has m replicas of an encoder or generator. Where these have as many microbatches as the LLM, the
    images of each are divided over all m, and replicas without one idle. With an m-th of the LLM's number, each replica
    owns the images of one in m LLM microbatches (Optimus, arXiv 2408.03505, section 4.2). Other numbers are those of
    `merged_microbatches`. What the recipe fixes stays.
    """
    num_llm = choices[LLM].global_batch // llm.dp
    free = [unit for unit in others if choices[unit].fixed_microbatches is None]
    counts = []
    for merged in merged_microbatches:
        counts.append({unit: num_llm // merged for unit in free if num_llm % merged == 0})
    owned = {unit: others[unit].dp // llm.dp for unit in free}
    counts.append({unit: num_llm // replicas for unit, replicas in owned.items() if num_llm % replicas == 0})
    is_smaller = [any(count < num_llm for count in candidate.values()) for candidate in counts]
    return [counts[i] for i, smaller in enumerate(is_smaller) if smaller and counts[i] not in counts[:i]]


def colocated_layout(
    layer_costs: LayerCosts,
    others: Mapping[str, MeshSize],
    llm: MeshSize,
    num_microbatches: Mapping[str, int] | None = None,
    divisions: Mapping[str, Sequence[int] | None] | None = None,
) -> Layout | None:
    """Divide every unit into stages of equal time; return None if a unit has too few layers.

    Nothing is recomputed but what the recipe says.

    Args:
        layer_costs: costs of the model on the sampled batches.
        others: meshes of the other units.
        llm: mesh of the LLM.
        num_microbatches: of each replica, by unit; default: those that the recipe fixes, else the LLM's number.
        divisions: by unit, the blocks of each stage where the recipe divides the unit, else None.
    """
    sizes = {unit.name: llm if unit.name == LLM else others[unit.name] for unit in layer_costs.shape.units}
    split = layer_costs.batch_split({unit: size.dp for unit, size in sizes.items()}, num_microbatches)
    units = {}
    for unit, size in sizes.items():
        seconds = layer_costs.unit_costs(unit, size.tp, split).seconds.tolist()
        [allowed] = division_masks(len(seconds), (divisions or {}).get(unit)) or (None,)
        bounds = min_max_partition(seconds, size.pp * size.vpp, allowed)
        if bounds is None:
            return None
        stages = [StagePlan(stage=i, chunk=i // size.pp, layers=layers) for i, layers in enumerate(pairwise(bounds))]
        units[unit] = UnitPlan(
            tp=size.tp,
            pp=size.pp,
            dp=size.dp,
            vpp=size.vpp,
            sp=layer_costs.has_sp(unit, size.tp),
            tp_chunks=layer_costs.num_chunks(unit, size.tp),
            bucket_parameters=layer_costs.bucket_parameters,
            ranks=_ranks_on_llm(size, llm),
            stages=tuple(stages),
        )
    return with_recompute(Layout("colocated", units, num_microbatches_of(split)), layer_costs, {})


def with_recompute(layout: Layout, layer_costs: LayerCosts, shares: Mapping[str, float]) -> Layout:
    """Return the layout with a share of each stage's layers recomputed, by unit; all where the recipe says so."""
    units = {}
    for name, unit in layout.units.items():
        share = 1.0 if layer_costs.recompute[name] == "all" else shares.get(name, 0.0)
        stages = tuple(
            stage.model_copy(update={"recompute": tuple(range(lo, lo + ceil(share * (hi - lo))))})
            for stage, (lo, hi) in ((stage, stage.layers) for stage in unit.stages)
        )
        units[name] = unit.model_copy(update={"stages": stages})
    return replace(layout, units=units)


def _ranks_on_llm(size: MeshSize, llm: MeshSize) -> tuple[int, ...]:
    """Return a unit's ranks: each LLM replica falls into blocks of pp x tp ranks with one replica of the unit each."""
    grid = np.arange(llm.ranks).reshape(llm.pp // size.pp, size.pp, llm.dp, llm.tp // size.tp, size.tp)
    return tuple(int(rank) for rank in grid.transpose(1, 2, 0, 3, 4).ravel())
