"""Choose the hardware, precision and cost model that a recipe asks for."""

import difflib
from collections.abc import Container
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from mmtrain.costs.analytic_costs import AnalyticCosts
from mmtrain.costs.cost_model import CostModel
from mmtrain.costs.cost_table import CostTable
from mmtrain.costs.find_hardware import is_other_hardware, is_same_hardware, preset
from mmtrain.costs.hardware import GB, GIB, US, Hardware, Link, Precision
from mmtrain.costs.layer_fields import layer_fields, layer_key
from mmtrain.costs.measured_costs import MeasuredCosts
from mmtrain.costs.recorded_costs import RECORDED_COSTS_FILE
from mmtrain.costs.time_spread import TimeSpread
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import DEFAULT_EXPERT_SPREAD, ModelShape
from mmtrain.recipe.settings.schema import Recipe

SpreadSource = Literal["recipe", "run", "default"]
_SETTING_OF = {"hardware": "cluster.hardware", "precision": "train.precision"}


def machine_for(recipe: Recipe, hardware: str) -> Hardware:
    """Return the preset named `hardware`, with the values that the recipe's cluster section overrides.

    Ports of a node are shared out among its ranks. Without `cluster.ports_per_node` a rank has the preset's share.
    Attention is that of `train.attention`, if the preset knows its rate. The
    spread of times is the preset's, see `machine_with_spread`: every rank asks for memory, so no table is read here.

    Raises:
        PlanError: there is no such preset.
    """
    machine = preset(hardware)
    cluster = recipe.cluster
    ranks_per_node = cluster.ranks_per_node or machine.ranks_per_node
    ports = cluster.ports_per_node
    return replace(
        machine.with_attention(recipe.train.attention),
        ranks_per_node=ranks_per_node,
        ports_per_rank=machine.ports_per_rank if ports is None else ports / ranks_per_node,
        intra_node=_stated_link(machine.intra_node, cluster.intra_node_gb_per_s, cluster.intra_node_latency_us),
        inter_node=_stated_link(machine.inter_node, cluster.inter_node_gb_per_s, cluster.inter_node_latency_us),
        rail_optimized=machine.rail_optimized if cluster.rail_optimized is None else cluster.rail_optimized,
        memory_bytes=cluster.memory_gib * GIB if cluster.memory_gib else machine.memory_bytes,
        host_memory_bytes=cluster.host_memory_gib * GIB if cluster.host_memory_gib else machine.host_memory_bytes,
    )


def machine_with_spread(recipe: Recipe, hardware: str) -> Hardware:
    """Return `machine_for` with the spread of times that the recipe states, else what its table measured.

    Raises:
        PlanError: there is no such preset, or the table cannot be read.
    """
    machine, cluster = machine_for(recipe, hardware), recipe.cluster
    spread = machine.time_spread
    measured = None if cluster.costs is None else _load_table(cluster.costs).time_spread
    for known in (measured, cluster.time_spread):
        if known is not None:
            ranks = spread.ranks if known.ranks is None else known.ranks
            layers = spread.layers if known.layers is None else known.layers
            spread = TimeSpread(ranks, layers)
    return replace(machine, time_spread=spread)


def expert_spread(recipe: Recipe, costs: CostModel) -> tuple[float, SpreadSource]:
    """Return how unevenly experts are loaded, and who says so: the recipe, else a run that recorded `costs`."""
    stated = recipe.parallel.llm.expert_spread
    if stated != "auto":
        return stated, "recipe"
    recorded = costs.table.expert_spread if isinstance(costs, MeasuredCosts) else None
    return (DEFAULT_EXPERT_SPREAD, "default") if recorded is None else (recorded, "run")


def _load_table(table: Path) -> CostTable:
    """Read the table that `cluster.costs` names."""
    return CostTable.load(_table_path(table))


def _stated_link(link: Link, gb_per_s: float | None, latency_us: float | None) -> Link:
    """Return a preset's link with what a recipe states of it; steps of collectives follow the latency of a message."""
    if gb_per_s is not None:
        link = replace(link, bytes_per_s=gb_per_s * GB)
    if latency_us is not None:
        latency_s = latency_us * US
        link = replace(link, latency_s=latency_s, step_s=link.step_s * latency_s / link.latency_s)
    return link


def precision_for(recipe: Recipe, machine: Hardware) -> Precision:
    """Return the precision of the recipe; `auto` means fp32 on a CPU and bf16 on a GPU."""
    if recipe.train.precision != "auto":
        return recipe.train.precision
    return "fp32" if machine.name == "cpu-core" else "bf16"


def costs_for(machine: Hardware, precision: Precision, table: Path | None) -> AnalyticCosts | MeasuredCosts:
    """Return the costs of a table, modelled where it has no entry; without a table all are modelled.

    Args:
        table: `cluster.costs`, a file, the folder of a run, or the name of a table that comes with the package.

    Raises:
        PlanError: the table does not exist, is damaged or empty, or was made for other hardware or another precision.
    """
    model = AnalyticCosts(machine, precision)
    if table is None:
        return model
    measured = _load_table(table)
    for what, of_table, needed in (
        ("hardware", measured.hardware, machine.name),
        ("precision", measured.precision, precision),
    ):
        if not is_same_hardware(of_table, needed):
            raise PlanError(
                f"cluster.costs: {table} was made for {what} {of_table}, but this is planned for {needed}; "
                f"set {_SETTING_OF[what]} to {of_table}, make a table with `mmtrain profile` on {needed}, or leave "
                "cluster.costs out"
            )
    if is_other_hardware(machine.name, measured.device):
        raise PlanError(
            f"cluster.costs: {table} contradicts itself: it is for hardware {measured.hardware}, and was measured on "
            f"`{measured.device}`; make a table with `mmtrain profile` on {machine.name}, or leave cluster.costs out"
        )
    if not measured.has_entries and not measured.is_recorded:
        raise PlanError(
            f"cluster.costs: {table} holds no entry (layers, messages, optimizer and layer_scales are empty); measure "
            "with `mmtrain profile RECIPE --out FILE`, or leave cluster.costs out to plan with modelled costs"
        )
    return MeasuredCosts(measured, model)


def costs_of_recipe(recipe: Recipe, hardware: str) -> AnalyticCosts | MeasuredCosts:
    """Return the costs that a recipe is planned with on the preset `hardware`; raises PlanError as `costs_for` does."""
    machine = machine_for(recipe, hardware)
    return costs_for(machine, precision_for(recipe, machine), recipe.cluster.costs)


def layers_without_entry(costs: AnalyticCosts | MeasuredCosts, shape: ModelShape) -> list[str]:
    """Name the kinds of layers of a model that a table of layers has at no tensor-parallel size, like `llm: head`."""
    if not isinstance(costs, MeasuredCosts) or not costs.table.layers:
        return []
    return _missing_layers({layer_key(entry.layer) for entry in costs.table.layers}, shape)


def require_model_of_run(costs: CostModel, shape: ModelShape) -> None:
    """Raise PlanError if a run of another model recorded the costs: its records say nothing of these layers."""
    if not isinstance(costs, MeasuredCosts) or costs.table.run is None:
        return
    missing = _missing_layers(costs.table.scale_by_layer, shape)
    if missing:
        raise PlanError(
            f"cluster.costs: the run {costs.table.run} trained another model, and recorded nothing of these layers "
            f"({'; '.join(missing)}); name a run of this model, measure with `mmtrain profile`, or leave cluster.costs "
            "out"
        )


def _missing_layers(known: Container[str], shape: ModelShape) -> list[str]:
    """Name the kinds of layers of a model that are not among the known keys, by unit."""
    missing = []
    for unit in shape.units:
        kinds = dict.fromkeys(layer.kind for layer in unit.layers if layer_key(layer_fields(layer)) not in known)
        if kinds:
            missing.append(f"{unit.name}: {', '.join(kinds)}")
    return missing


def _table_path(table: Path) -> Path:
    """Return the file of a table. PlanError for a folder in which no run has left one, and for an unknown name."""
    if is_shipped(table) and (table.name in _shipped_names() or not table.is_dir()):
        return _shipped_path(table.name)
    if not table.is_dir():
        return table
    recorded = table / RECORDED_COSTS_FILE
    if recorded.exists():
        return recorded
    raise PlanError(
        f"cluster.costs: {table} is a folder without {RECORDED_COSTS_FILE}. A run writes that when it is done, from "
        "what its last steps took, if it had at least eleven and train.replan is not off; name the folder of such a "
        "run, or a file that `mmtrain profile RECIPE --out FILE` wrote"
    )


def is_shipped(table: Path) -> bool:
    """Return whether `cluster.costs` names a table of the package rather than a file: a bare word without a suffix."""
    return table.parent == Path(".") and not table.suffix


def _shipped_names() -> list[str]:
    return sorted(path.stem for path in _shipped_folder().glob("*.json"))


def _shipped_folder() -> Path:
    return Path(str(files("mmtrain.costs"))) / "tables"


def _shipped_path(name: str) -> Path:
    """Return the file of a table that comes with the package; PlanError lists those that do."""
    known = _shipped_names()
    if name in known:
        return _shipped_folder() / f"{name}.json"
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"; did you mean `{nearest[0]}`?" if nearest else "."
    raise PlanError(
        f"cluster.costs: `{name}` is not a table that comes with mmtrain{hint} Known: {', '.join(known)}; "
        "a file of your own is given with its suffix, like costs.json"
    )
