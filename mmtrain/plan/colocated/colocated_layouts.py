"""Colocated layouts of a recipe: every LLM size, with encoders on the same ranks under sizes of their own."""

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from math import ceil

import numpy as np

from mmtrain.plan.artifact.layout import Layout, MeshSize
from mmtrain.plan.artifact.plan import StagePlan, UnitPlan
from mmtrain.plan.estimate.layer_costs import LayerCosts, num_microbatches_of
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.plan.search.min_max_partition import min_max_partition
from mmtrain.program.ir.graph import LLM


def llm_mesh_sizes(choices: Mapping[str, UnitChoices], world_size: int) -> Iterator[MeshSize]:
    """Sizes of the LLM on all ranks; a replica on one rank has no bubbles, and is `unified`.

    Where the recipe wants several chunks on a rank, there are enough layers for them.
    """
    llm = choices[LLM]
    chunks = llm.fixed_vpp or 1
    for size in llm.sizes(world_size):
        if size.tp * size.pp > 1 and (chunks == 1 or (size.pp > 1 and size.pp * chunks <= llm.layers)):
            yield size


def encoder_mesh_sizes(choices: Mapping[str, UnitChoices], llm: MeshSize) -> Iterator[dict[str, MeshSize]]:
    """Sizes of all encoders on an LLM's ranks: tp and pp divide the LLM's, and replicas fill all ranks."""
    encoders = [unit for name, unit in choices.items() if name != LLM]
    each = [
        [
            MeshSize(tp, pp, llm.ranks // (tp * pp))
            for tp in unit.tp
            for pp in unit.pp
            if llm.tp % tp == 0
            and llm.pp % pp == 0
            and llm.ranks // (tp * pp) in unit.dp
            and unit.fixed_vpp in (None, 1)  # their layers go into the LLM's bubbles one stage a rank
        ]
        for unit in encoders
    ]
    yield from (dict(zip([u.name for u in encoders], sizes, strict=True)) for sizes in product(*each))


def colocated_layout(
    layer_costs: LayerCosts,
    encoders: Mapping[str, MeshSize],
    llm: MeshSize,
    recompute: Mapping[str, float] | None = None,
) -> Layout | None:
    """Cut every unit into stages of equal time; None if it has too few layers for that.

    recompute: by unit, the share of each stage's layers that is recomputed, where the recipe does not say all.
    """
    sizes = {unit.name: llm if unit.name == LLM else encoders[unit.name] for unit in layer_costs.shape.units}
    spread = layer_costs.batch_split({name: size.dp for name, size in sizes.items()})
    units = {}
    for name, size in sizes.items():
        cuts = min_max_partition(layer_costs.unit_costs(name, size.tp, spread).seconds.tolist(), size.pp * size.vpp)
        if cuts is None:
            return None
        share = 1.0 if layer_costs.recompute[name] == "all" else (recompute or {}).get(name, 0.0)
        stages = tuple(
            StagePlan(
                stage=i, chunk=i // size.pp, layers=(lo, hi), recompute=tuple(range(lo, lo + ceil(share * (hi - lo))))
            )
            for i, (lo, hi) in enumerate(pairwise(cuts))
        )
        units[name] = UnitPlan(
            tp=size.tp,
            pp=size.pp,
            dp=size.dp,
            vpp=size.vpp,
            sp=layer_costs.has_sp(name, size.tp),
            ranks=_on_top(size, llm),
            stages=stages,
        )
    return Layout("colocated", units, num_microbatches_of(spread))


def _on_top(size: MeshSize, llm: MeshSize) -> tuple[int, ...]:
    """Ranks of a unit on the LLM's: each LLM replica falls into blocks of pp x tp ranks, a replica on each."""
    grid = np.arange(llm.ranks).reshape(llm.pp // size.pp, size.pp, llm.dp, llm.tp // size.tp, size.tp)
    return tuple(int(rank) for rank in grid.transpose(1, 2, 0, 3, 4).ravel())
