"""Correct a cost table by what a run recorded; the result is a table like any other (`cluster.costs`)."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.cost_table import CostTable, LayerScale, layer_fields, layer_key
from mmtrain.costs.hardware import Hardware, Precision
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.models.shapes.model_shape import ModelShape

RECORDED_COSTS_FILE = "recorded_costs.json"  # in the folder of a run: the plan's costs, corrected by its records


@dataclass(frozen=True)
class RecordedRatios:
    """Recorded over predicted seconds, by kind of work; a kind that was not recorded is absent or None."""

    forward: Mapping[str, float]  # by unit
    backward: Mapping[str, float]
    reductions: float | None = None  # of shared weights' gradients, with the optimizer step
    messages: float | None = None  # between two ranks


def recorded_table(
    costs: CostModel,
    machine: Hardware,
    precision: Precision,
    shape: ModelShape,
    ratios: RecordedRatios,
    run: str | None = None,
    expert_spread: float | None = None,
) -> CostTable:
    """Return the table of `costs`, corrected by the ratios of what was recorded to what `costs` predicted.

    run: the folder of the run that recorded them. expert_spread: how unevenly its experts were loaded, at which the
    predictions of `ratios` were made; None without mixtures of experts.

    All layers of a unit are corrected alike, and where several units have the same layer, the last one counts: records
    tell units apart, not layers. A table that was corrected before is corrected further.
    """
    scales: dict[str, LayerScale] = {}
    for unit in shape.units:
        forward, backward = ratios.forward.get(unit.name, 1.0), ratios.backward.get(unit.name, 1.0)
        for layer in map(layer_fields, unit.layers):
            scales[layer_key(layer)] = LayerScale(layer=layer, forward=forward, backward=backward)
    table = scaled_table(costs, machine, precision, scales, ratios, run)
    return table if expert_spread is None else table.model_copy(update={"expert_spread": expert_spread})


def with_activation_ratios(
    costs: CostModel, machine: Hardware, precision: Precision, shape: ModelShape, ratios: Mapping[str, float]
) -> CostModel:
    """Return costs whose layers keep so many times the bytes that recomputing them saves, by unit; seconds stay.

    Where several units have the same layer, the last one counts.
    """
    scales: dict[str, LayerScale] = {}
    for unit in shape.units:
        for layer in map(layer_fields, unit.layers):
            scales[layer_key(layer)] = LayerScale(layer=layer, activations=ratios.get(unit.name, 1.0))
    return costs_of_table(scaled_table(costs, machine, precision, scales, RecordedRatios({}, {})), machine, precision)


def scaled_table(
    costs: CostModel,
    machine: Hardware,
    precision: Precision,
    scales: Mapping[str, LayerScale],
    ratios: RecordedRatios,
    run: str | None = None,
) -> CostTable:
    """Return the table of `costs` with layers, by their key, and communication multiplied.

    A table that was corrected before is corrected further. ratios: of which those of units are not read.
    """
    table = costs.table if isinstance(costs, MeasuredCosts) else _empty_table(machine, precision)
    scaled = dict(table.scale_by_layer)
    for key, scale in scales.items():
        before = table.scale_by_layer.get(key, LayerScale(layer=scale.layer))
        scaled[key] = LayerScale(
            layer=scale.layer,
            forward=before.forward * scale.forward,
            backward=before.backward * scale.backward,
            activations=before.activations * scale.activations,
        )
    fields = {name: getattr(table, name) for name in CostTable.model_fields}
    corrected = {
        "run": run or table.run,
        "layer_scales": tuple(scaled.values()),
        "message_scale": table.message_scale * (ratios.messages or 1.0),
        "reduction_scale": table.reduction_scale * (ratios.reductions or 1.0),
    }
    return CostTable(**(fields | corrected))  # not `model_copy`, which copies what the old table has cached


def costs_of_table(table: CostTable, machine: Hardware, precision: Precision) -> CostModel:
    """Return the costs of a table that is known to fit this hardware and precision."""
    return MeasuredCosts(table, AnalyticCosts(machine, precision))


def _empty_table(machine: Hardware, precision: Precision) -> CostTable:
    """Return a table without entries: everything is modelled, and then scaled."""
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return CostTable(hardware=machine.name, device=machine.name, precision=precision, software={}, date=date)
