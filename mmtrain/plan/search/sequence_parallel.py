"""Which units share out their tokens between products (sequence parallelism), at which tensor-parallel sizes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mmtrain.costs import Hardware
from mmtrain.costs.sequence_parallel_costs import sequence_parallel_seconds
from mmtrain.plan.estimate.layer_costs import BatchSplit, LayerCosts
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.program.ir.graph import LLM

SequenceParallelSetting = Literal["auto"] | bool  # what the recipe says of a unit


def with_sequence_parallelism(
    layer_costs: LayerCosts,
    wanted: Mapping[str, SequenceParallelSetting],
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    *,
    at_any_price: bool = False,
) -> LayerCosts:
    """The layer_costs with sequence parallelism where the recipe asks for it, or leaves it open and it costs no time.

    It always spares memory. Whether it costs time is asked of a microbatch of mean size, for a whole unit at each
    tensor-parallel size; seconds that it would save are not counted on. at_any_price: wherever it is left open.
    """
    found = {}
    for name, asked in wanted.items():
        is_possible = layer_costs.shape.unit(name).kind != "generator"
        sizes = [tp for tp in choices[name].tp if tp > 1 and asked and is_possible]
        if asked == "auto" and not at_any_price:
            sizes = [tp for tp in sizes if _added(layer_costs, name, tp, choices[LLM].batch, machine) <= 0]
        found[name] = frozenset(sizes)
    return replace(layer_costs, sp=found, _lines={})


def _added(layer_costs: LayerCosts, unit: str, tp: int, batch: int, machine: Hardware) -> float:
    """Seconds that a microbatch of mean size takes longer in a unit's forward and backward."""
    alone: BatchSplit = tuple((u.name, 1, batch) for u in layer_costs.shape.units)
    tokens = round(float(layer_costs.microbatch_loads(unit, alone).tokens.mean()))
    layers = zip(layer_costs.shape.unit(unit).layers, layer_costs.input_grad[unit], strict=True)
    return sum(
        count
        * sequence_parallel_seconds(
            layer, tp, tokens, layer_costs.costs, machine, layer_costs.precision, input_grad=needed
        )
        for (layer, needed), count in Counter(layers).items()
    )
