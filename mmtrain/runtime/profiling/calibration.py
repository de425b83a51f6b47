"""Calibrate the costs of a CPU on this machine: by a GEMM, a copy, messages and collectives, in a few seconds.

A cost table of another day or machine, and the preset, are off by the speed of this machine's cores: up to a factor of
three. Both ranks measure at once, on a core each, as they will train. What a table holds is corrected by how much the
cores have changed since it was measured, and what is modelled by how much they differ from the preset.
"""

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from pydantic import BaseModel

from mmtrain.costs import (
    AnalyticCosts,
    CostModel,
    CostTable,
    GroupLayout,
    Hardware,
    MeasuredCosts,
    Precision,
    TokenLoad,
)
from mmtrain.costs.collectives import CollectiveKind
from mmtrain.costs.core_ratios import CoreRatios, core_ratios, modelled_core_speed
from mmtrain.costs.cost_table import CoreSpeed, LayerScale, MessageEntry, layer_fields, layer_key
from mmtrain.costs.recorded_costs import RecordedRatios, scaled_table
from mmtrain.models.model_shape import ModelShape, UnitShape
from mmtrain.runtime.profiling.core_speed import measure_core_speed
from mmtrain.runtime.profiling.message_profiler import measure_messages
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave

NUM_RANKS = 2
MESSAGE_BYTES = (2**12, 2**18, 2**22)
_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_reduce", "all_gather", "reduce_scatter")  # that runs wait for


@dataclass(frozen=True)
class Calibration:
    """How fast this machine's cores are, and measured over predicted seconds of its messages."""

    cores: CoreRatios
    message: float
    collective: float
    # The cores when the table was measured; as the preset's where that is not known.
    at_table: CoreRatios = field(default_factory=CoreRatios)

    def __str__(self) -> str:
        gemm, copy = self.cores.gemm / self.at_table.gemm, self.cores.copy / self.at_table.copy
        return (
            f"GEMMs take {gemm:.2f}x, copies {copy:.2f}x, messages {self.message:.2f}x and collectives "
            f"{self.collective:.2f}x of what was predicted"
        )


class _Measured(BaseModel):
    cores: CoreSpeed
    messages: list[MessageEntry]


def calibrate(costs: CostModel, machine: Hardware, precision: Precision) -> Calibration:
    """Measure on two cores of this machine and compare with what the costs say. Raises RunError if a rank fails."""
    with TemporaryDirectory(prefix="mmtrain-calibrate-") as folder:
        out = Path(folder) / "measured.json"
        launch_local(NUM_RANKS, partial(_measure_rank, out))
        measured = _Measured.model_validate_json(out.read_text(encoding="utf-8"))
    pair = GroupLayout(NUM_RANKS)
    at_table = costs.table.core_speed if isinstance(costs, MeasuredCosts) else None
    return Calibration(
        cores=core_ratios(measured.cores, machine, precision),
        at_table=CoreRatios() if at_table is None else core_ratios(at_table, machine, precision),
        message=statistics.geometric_mean(_ratios(measured.messages, "p2p", partial(costs.transfer, same_node=True))),
        collective=statistics.geometric_mean(
            ratio
            for kind in _COLLECTIVES
            for ratio in _ratios(measured.messages, kind, partial(costs.collective, kind, group=pair))
        ),
    )


def calibrated_table(
    costs: AnalyticCosts | MeasuredCosts, shape: ModelShape, calibration: Calibration, tokens: int
) -> CostTable:
    """Return the table of `costs`, with each unit's layers corrected by the speed of this machine's cores.

    How much of a unit's time are GEMMs and how much is memory traffic is modelled, for a microbatch of `tokens`.
    """
    model = costs.model if isinstance(costs, MeasuredCosts) else costs
    machine, precision = model.hardware, model.precision
    measured_layers = costs.table.measured_layers if isinstance(costs, MeasuredCosts) else frozenset[str]()
    load = TokenLoad(tokens, tokens * tokens // 2, tokens // 2, 2)

    def unit_seconds(unit: UnitShape, cores: CoreRatios) -> float:
        of_cores = AnalyticCosts(cores.applied(machine), precision)
        return sum(of_cores.seconds(layer, 1, load, "forward") for layer in unit.layers)

    scales: dict[str, LayerScale] = {}
    for unit in shape.units:
        now_s = unit_seconds(unit, calibration.cores)
        of_measured = now_s / unit_seconds(unit, calibration.at_table)
        of_modelled = now_s / unit_seconds(unit, CoreRatios())
        for layer in map(layer_fields, unit.layers):
            key = layer_key(layer)
            ratio = of_measured if key in measured_layers else of_modelled
            scales[key] = LayerScale(layer=layer, forward=ratio, backward=ratio)
    ratios = RecordedRatios({}, {}, reductions=calibration.collective, messages=calibration.message)
    table = scaled_table(costs, machine, precision, scales, ratios)
    cores_now = modelled_core_speed(calibration.cores.applied(machine), precision)
    return table.model_copy(update={"calibrated": True, "core_speed": cores_now})


def _ratios(entries: list[MessageEntry], kind: str, predicted_s: Callable[[int], float]) -> list[float]:
    """Return measured over predicted seconds of one kind of message, by size."""
    entry = next(entry for entry in entries if entry.kind == kind)
    pairs = zip(entry.nbytes, entry.seconds, strict=True)
    return [max(seconds, 1e-9) / predicted_s(nbytes) for nbytes, seconds in pairs]


def _measure_rank(out: Path, address: Address) -> None:
    """Measure as one rank, on a core of its own; the first rank writes what it found."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    measured = _Measured(cores=measure_core_speed(), messages=measure_messages(world, MESSAGE_BYTES))
    if world.is_first:
        out.write_text(measured.model_dump_json(), encoding="utf-8")
    leave()
