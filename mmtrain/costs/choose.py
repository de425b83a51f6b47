"""Measured costs where there is a table, modelled ones where there is none."""

import difflib
from importlib.resources import files
from pathlib import Path

from mmtrain.costs.hardware import Hardware, Precision
from mmtrain.costs.measured import MeasuredCosts
from mmtrain.costs.model import AnalyticCosts
from mmtrain.costs.table import CostTable
from mmtrain.costs.types import CostModel
from mmtrain.errors import PlanError


def costs_for(machine: Hardware, precision: Precision, table: Path | None) -> CostModel:
    """Costs from a table (the recipe's `cluster.costs`: a file, or a shipped table's name), modelled where it has none.

    Raises PlanError for a table that is not there or wrong, and for one of other hardware or another precision.
    """
    model = AnalyticCosts(machine, precision)
    if table is None:
        return model
    measured = CostTable.load(_shipped(table.name) if is_shipped(table) else table)
    for what, found, needed in (
        ("hardware", measured.hardware, machine.name),
        ("precision", measured.precision, precision),
    ):
        if found != needed:
            raise PlanError(
                f"cluster.costs: {table} was made for {what} {found}, but this is planned for {needed}; "
                "make one with `mmtrain profile` there, or leave cluster.costs out"
            )
    return MeasuredCosts(measured, model)


def is_shipped(table: Path) -> bool:
    """Whether `cluster.costs` names a table of the package rather than a file: a bare word without a suffix."""
    return table.parent == Path(".") and not table.suffix


def _shipped(name: str) -> Path:
    """The file of a table that comes with the package; PlanError names those that do."""
    folder = Path(str(files("mmtrain.costs"))) / "tables"
    known = sorted(path.stem for path in folder.glob("*.json"))
    if name in known:
        return folder / f"{name}.json"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else ""
    raise PlanError(
        f"cluster.costs: `{name}` is no table that comes with mmtrain{hint} Known: {', '.join(known)}; "
        "a file of your own is given with its suffix, like costs.json"
    )
