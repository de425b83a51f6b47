"""Pacing: in which waves of a pipeline position a unit runs its microbatches, and how long a warm-up that takes.

A pipeline position counts time in *waves*. Where all its units have the same number of microbatches, wave i is
microbatch i. Where they differ, the LLM (or without it a unit with most microbatches) has one microbatch a wave, and
the other units run theirs in the waves that `UnitPace` says.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mmtrain.program.ir.graph import LLM, Edge, StageGraph, microbatches_per_block


@dataclass(frozen=True)
class UnitPace:
    """A unit that runs `num_microbatches` (a block) for each `num_waves` waves of its position.

    Units of the position that read a block need all of it in their first wave of the block, and its gradient is
    complete after their last. A `late` unit is the reverse: it reads from the others, so its input is complete with
    the last wave of the block, and the first wave waits for its gradient.
    """

    num_microbatches: int
    num_waves: int
    late: bool

    def due(self, is_forward: bool, wave: int) -> range:
        """Return the indices of the microbatches whose forward or backward is due in `wave`."""
        block, wave_of_block = divmod(wave, self.num_waves)
        if wave_of_block != self.due_at(is_forward):
            return range(0)
        first = block * self.num_microbatches
        return range(first, first + self.num_microbatches)

    def wave(self, is_forward: bool, index: int) -> int:
        """Return the wave in which microbatch `index` is due."""
        return index // self.num_microbatches * self.num_waves + self.due_at(is_forward)

    def num_forwards(self, wave: int) -> int:
        """Return how many microbatches have their forward due in `wave` or before."""
        return (wave - self.due_at(True) + self.num_waves) // self.num_waves * self.num_microbatches

    def in_flight(self, num_warmup_waves: int) -> int:
        """Return the most microbatches between forward and backward if so many waves run before the first returns.

        This holds for a step of any length; a short step never holds more than all its microbatches.
        """
        return self.num_forwards(num_warmup_waves if self.late else num_warmup_waves + self.num_waves - 1)

    @property
    def min_warmup_waves(self) -> int:
        """Waves that must run forward before the first one can return."""
        return self.num_waves - 1 if self.late else 0

    def due_at(self, is_forward: bool) -> int:
        """Return the wave of a block in which its microbatches are due."""
        return self.num_waves - 1 if is_forward == self.late else 0


def pace_units(graph: StageGraph, units: Iterable[str]) -> tuple[int, dict[str, UnitPace]]:
    """Return the number of waves of a position that holds these units, and the pace of each."""
    counts = {unit: graph.mesh(unit).num_microbatches for unit in units}
    counts_differ = len(set(counts.values())) > 1
    clock = LLM if LLM in counts and counts_differ else max(counts, key=lambda unit: counts[unit])
    num_waves = counts[clock]
    downstream = _downstream_of(graph, clock)
    pace_by_unit = {}
    for unit, count in counts.items():
        num_microbatches, waves_per_block = microbatches_per_block(count, num_waves)
        pace_by_unit[unit] = UnitPace(num_microbatches, waves_per_block, late=unit in downstream and count != num_waves)
    return num_waves, pace_by_unit


@dataclass(frozen=True)
class ConsumerDemand:
    """What a stage asks of the position that feeds it, in waves of the stage's own position.

    `warmup_depth` waves run forward before one of them returns, not counting that one. `buffered_waves` more must be
    ready for a source as fast as the stage to keep up with it.
    """

    pace: UnitPace
    warmup_depth: int
    buffered_waves: int


def warmup_waves(graph: StageGraph, edge: Edge, pace: UnitPace, demand: ConsumerDemand) -> int:
    """Count the waves that must leave the source's position, of this pace, before the first of them comes back.

    What comes back waits for `warmup_depth` waves of the destination, and these wait for everything that feeds them.
    One block more is under way, and what the destination buffers, so that no rank needs to wait.
    """
    num_src, num_dst = (graph.mesh(stage.unit).num_microbatches for stage in (edge.src, edge.dst))
    sources, destinations = microbatches_per_block(num_src, num_dst) if edge.crosses_units else (1, 1)
    # After so many microbatches of the source, all units start a block of theirs, and everything repeats.
    period = num_src // math.gcd(*(mesh.num_microbatches for mesh in graph.meshes))

    def last_needed(wave: int) -> int:
        """Return the last wave that feeds what the destination has run forward in `wave`."""
        num_forwards = demand.pace.num_forwards(wave)
        return pace.wave(True, -(-num_forwards // destinations) * sources - 1)

    block = -(-sources * pace.num_waves // pace.num_microbatches)
    counts = []
    for index in range(period):
        last_of_block = (index // sources + 1) * destinations - 1
        destination_wave = demand.pace.wave(False, last_of_block) + demand.warmup_depth
        needed = max(last_needed(destination_wave) + block, last_needed(destination_wave + demand.buffered_waves))
        counts.append(needed - pace.wave(False, index))
    return max(counts)


def _downstream_of(graph: StageGraph, unit: str) -> set[str]:
    """Return the units that read from `unit`, directly or through others."""
    downstream = {unit}
    for stage in graph.order:
        if any(e.src.unit in downstream for e in graph.inputs(stage)):
            downstream.add(stage.unit)
    return downstream - {unit}
