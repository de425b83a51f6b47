"""Which units share out their tokens between products (sequence parallelism), at which tensor-parallel sizes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from mmtrain.costs import Hardware
from mmtrain.costs.sequence_parallel_costs import slicing_seconds
from mmtrain.plan.estimate.layer_costs import Pricing, Spread
from mmtrain.plan.search.constraints import UnitChoices
from mmtrain.program.ir.graph import LLM

Slicing = Literal["auto"] | bool  # what the recipe says of a unit


def with_slices(
    pricing: Pricing,
    wanted: Mapping[str, Slicing],
    choices: Mapping[str, UnitChoices],
    machine: Hardware,
    *,
    at_any_price: bool = False,
) -> Pricing:
    """The pricing with sequence parallelism where the recipe asks for it, or leaves it open and it costs no time.

    It always spares memory. Whether it costs time is asked of a microbatch of mean size, for a whole unit at each
    tensor-parallel size; seconds that it would save are not counted on. at_any_price: wherever it is left open.
    """
    found = {}
    for name, asked in wanted.items():
        is_possible = pricing.shape.unit(name).kind != "generator"
        sizes = [tp for tp in choices[name].tp if tp > 1 and asked and is_possible]
        if asked == "auto" and not at_any_price:
            sizes = [tp for tp in sizes if _added(pricing, name, tp, choices[LLM].batch, machine) <= 0]
        found[name] = frozenset(sizes)
    return replace(pricing, sp=found, _lines={})


def _added(pricing: Pricing, unit: str, tp: int, batch: int, machine: Hardware) -> float:
    """Seconds that a microbatch of mean size takes longer in a unit's forward and backward."""
    alone: Spread = tuple((u.name, 1, batch) for u in pricing.shape.units)
    tokens = round(float(pricing.grid(unit, alone).tokens.mean()))
    layers = zip(pricing.shape.unit(unit).layers, pricing.input_grad[unit], strict=True)
    return sum(
        count * slicing_seconds(layer, tp, tokens, pricing.costs, machine, pricing.precision, input_grad=needed)
        for (layer, needed), count in Counter(layers).items()
    )
