"""Calibrate the costs of a CPU on this machine: one GEMM, one copy, one message, in about two seconds.

A cost table of another day or machine, and the preset, are off by the speed of this machine's cores: up to a factor of
three. Both ranks measure at once, on a core each, as they will train.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from mmtrain.costs.analytic_costs import gemm_seconds
from mmtrain.costs.cost_table import MessageEntry
from mmtrain.costs.layer_arithmetic import Gemm
from mmtrain.costs.recorded_costs import RecordedRatios, recorded_table
from mmtrain.models.model_shape import ModelShape
from mmtrain.runtime.profiling.message_profiler import measure_messages
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave

NUM_RANKS = 2
GEMM_SIDE = 512
COPIED_BYTES = 2**26  # larger than caches
MESSAGE_BYTES = (2**12, 2**20)
SECONDS_OF_EACH = 0.5  # of repeating the GEMM, and of repeating the copy


@dataclass(frozen=True)
class Calibration:
    """Measured over predicted seconds on this machine."""

    gemm: float
    copy: float
    message: float
    collective: float

    def __str__(self) -> str:
        return (
            f"GEMMs take {self.gemm:.2f}x, copies {self.copy:.2f}x, messages {self.message:.2f}x and collectives "
            f"{self.collective:.2f}x of what was predicted"
        )


class _Measured(BaseModel):
    gemm_s: float
    copy_s: float
    messages: list[MessageEntry]


def calibrate(costs: CostModel, machine: Hardware, precision: Precision) -> Calibration:
    """Measure on two cores of this machine and compare with what the costs say. Raises RunError if a rank fails."""
    with TemporaryDirectory(prefix="mmtrain-calibrate-") as folder:
        out = Path(folder) / "measured.json"
        launch_local(NUM_RANKS, partial(_measure_rank, out))
        measured = _Measured.model_validate_json(out.read_text(encoding="utf-8"))
    gemm_s = gemm_seconds(machine, precision, Gemm(GEMM_SIDE, GEMM_SIDE, GEMM_SIDE))
    pair = GroupLayout(NUM_RANKS)
    return Calibration(
        gemm=measured.gemm_s / gemm_s,
        copy=measured.copy_s / (2 * COPIED_BYTES / machine.moved_bytes_per_s),
        message=_ratio(measured.messages, "p2p", lambda nbytes: costs.transfer(nbytes, same_node=True)),
        collective=_ratio(measured.messages, "all_reduce", lambda nbytes: costs.collective("all_reduce", nbytes, pair)),
    )


def calibrated_table(
    costs: AnalyticCosts | MeasuredCosts, shape: ModelShape, calibration: Calibration, tokens: int
) -> CostTable:
    """Return the table of `costs`, with each unit's layers corrected by the speed of this machine's cores.

    How much of a unit's time are GEMMs and how much is memory traffic is modelled, for a microbatch of `tokens`. The
    time in which kernels start is Python's, which depends on the core as GEMMs do.
    """
    model = costs.model if isinstance(costs, MeasuredCosts) else costs
    machine, precision = model.hardware, model.precision
    calibrated = replace(
        machine,
        fp32_flops=machine.fp32_flops / calibration.gemm,
        bf16_flops=machine.bf16_flops / calibration.gemm,
        kernel_launch_s=machine.kernel_launch_s * calibration.gemm,
        memory_bytes_per_s=machine.memory_bytes_per_s / calibration.copy,
    )
    before, after = (AnalyticCosts(hardware, precision) for hardware in (machine, calibrated))
    load = TokenLoad(tokens, tokens * tokens // 2, tokens // 2, 2)
    ratios = {}
    for unit in shape.units:
        seconds = [sum(c.seconds(layer, 1, load, "forward") for layer in unit.layers) for c in (before, after)]
        ratios[unit.name] = seconds[1] / seconds[0]
    recorded = RecordedRatios(ratios, ratios, reductions=calibration.collective, messages=calibration.message)
    return recorded_table(costs, machine, precision, shape, recorded).model_copy(update={"calibrated": True})


def _ratio(entries: list[MessageEntry], kind: str, predicted_s: Callable[[int], float]) -> float:
    """Return measured over predicted seconds, the geometric mean over sizes."""
    entry = next(entry for entry in entries if entry.kind == kind)
    pairs = zip(entry.nbytes, entry.seconds, strict=True)
    return statistics.geometric_mean(max(seconds, 1e-9) / predicted_s(nbytes) for nbytes, seconds in pairs)


def _measure_rank(out: Path, address: Address) -> None:
    """Measure as one rank, on a core of its own; the first rank writes what it found."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[address.local_rank % len(cores)]})
    world = join(address)
    a, b = (torch.randn(GEMM_SIDE, GEMM_SIDE) for _ in range(2))
    source = torch.zeros(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    measured = _Measured(
        gemm_s=_median_seconds(lambda: a @ b),
        copy_s=_median_seconds(lambda: target.copy_(source)),
        messages=measure_messages(world, MESSAGE_BYTES),
    )
    if world.is_first:
        out.write_text(measured.model_dump_json(), encoding="utf-8")
    leave()


def _median_seconds(work: Callable[[], object]) -> float:
    """Return the median of repetitions that take `SECONDS_OF_EACH` together."""
    seconds: list[float] = []
    while sum(seconds) < SECONDS_OF_EACH or len(seconds) < 3:
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)
