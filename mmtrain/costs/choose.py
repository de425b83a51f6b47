"""Measured costs where there is a table, modelled ones where there is none."""

from pathlib import Path

from mmtrain.costs.hardware import Hardware, Precision
from mmtrain.costs.measured import MeasuredCosts
from mmtrain.costs.model import AnalyticCosts
from mmtrain.costs.table import CostTable
from mmtrain.costs.types import CostModel
from mmtrain.errors import PlanError


def costs_for(machine: Hardware, precision: Precision, table: Path | None) -> CostModel:
    """Costs from a table (the recipe's `cluster.costs`), modelled where it has none.

    Raises PlanError for a table of other hardware or another precision.
    """
    model = AnalyticCosts(machine, precision)
    if table is None:
        return model
    measured = CostTable.load(table)
    for what, found, needed in (
        ("hardware", measured.hardware, machine.name),
        ("precision", measured.precision, precision),
    ):
        if found != needed:
            raise PlanError(
                f"cluster.costs: {table} was measured with {what} {found}, but this is planned for {needed}; "
                "make one with `mmtrain profile` there, or leave cluster.costs out"
            )
    return MeasuredCosts(measured, model)
