"""Paces: in which turns of a position a unit runs its microbatches, and how far ahead of others that makes it run.

A position counts its turns in *waves*. Where all its units have the same number of microbatches, wave i is microbatch
i. Where they differ, the LLM (or without it a unit with most) has one microbatch a wave and the others keep its time.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mmtrain.program.ir.graph import LLM, Edge, StageGraph, microbatches_per_block


@dataclass(frozen=True)
class UnitPace:
    """A unit runs blocks of `num_microbatches` for each `num_waves` waves of its position.

    What others there read must be whole for the first wave of its block, and its gradient is whole after the last. A
    `late` unit reads from them: its input is whole with the last wave, and the first waits for its gradient.
    """

    num_microbatches: int
    num_waves: int
    late: bool

    def due(self, is_forward: bool, wave: int) -> range:
        """Microbatches, by index, whose forward or backward is due in `wave`."""
        block, at = divmod(wave, self.num_waves)
        first = block * self.num_microbatches
        return range(first, first + self.num_microbatches) if at == self.due_at(is_forward) else range(0)

    def wave(self, is_forward: bool, index: int) -> int:
        """The wave in which a microbatch is due."""
        return index // self.num_microbatches * self.num_waves + self.due_at(is_forward)

    def forwards(self, wave: int) -> int:
        """Microbatches whose forward is due in `wave` or before."""
        return (wave - self.due_at(True) + self.num_waves) // self.num_waves * self.num_microbatches

    def in_flight(self, ahead: int) -> int:
        """Return the most microbatches between forward and backward after a warm-up of `num_warmup_waves` waves.

        In a step of any length; one that is shorter holds no more than all of its microbatches.
        """
        return self.forwards(ahead if self.late else ahead + self.num_waves - 1)

    @property
    def min_warmup_waves(self) -> int:
        """Waves that must run forward before the first one can return."""
        return self.num_waves - 1 if self.late else 0

    def due_at(self, is_forward: bool) -> int:
        """Wave of a block in which its microbatches are due."""
        return self.num_waves - 1 if is_forward == self.late else 0


def pace_units(graph: StageGraph, units: Iterable[str]) -> tuple[int, dict[str, UnitPace]]:
    """Waves of a position that holds these units, and the pace of each."""
    counts = {unit: graph.mesh(unit).num_microbatches for unit in units}
    clock = LLM if LLM in counts and len(set(counts.values())) > 1 else max(counts, key=lambda unit: counts[unit])
    after = _fed_by(graph, clock)
    waves = counts[clock]
    return waves, {
        u: UnitPace(*microbatches_per_block(n, waves), late=u in after and n != waves) for u, n in counts.items()
    }


@dataclass(frozen=True)
class ConsumerDemand:
    """What a stage asks of the position that feeds it.

    `warmup_depth` of its waves run forward before one of them returns, that one left out; `buffered_waves` more must be
    ready for a source that is as fast to keep up with it.
    """

    pace: UnitPace
    warmup_depth: int
    buffered_waves: int


def warmup_waves(graph: StageGraph, edge: Edge, own: UnitPace, demand: ConsumerDemand) -> int:
    """Count the waves that must have left the source's position, of pace `own`, before the first of them comes back.

    What comes back waits for `warmup_depth` waves of the destination's, and they for all that feeds them. So that
    nobody need wait, one block more is under way, and the destination's stock.
    """
    src, dst = (graph.mesh(sid.unit).num_microbatches for sid in (edge.src, edge.dst))
    sources, destinations = microbatches_per_block(src, dst) if edge.crosses_units else (1, 1)
    period = src // math.gcd(*(mesh.num_microbatches for mesh in graph.meshes))  # then all begins anew

    def until(wave: int) -> int:
        """The last wave that feeds what the destination has run forward in `wave`."""
        fed = demand.pace.forwards(wave)
        return own.wave(True, -(-fed // destinations) * sources - 1)

    returns = [
        (
            own.wave(False, index),
            demand.pace.wave(False, (index // sources + 1) * destinations - 1) + demand.warmup_depth,
        )
        for index in range(period)
    ]
    block = -(-sources * own.num_waves // own.num_microbatches)
    return max(max(until(last) + block, until(last + demand.buffered_waves)) - first for first, last in returns)


def _fed_by(graph: StageGraph, unit: str) -> set[str]:
    """Units that read, by way of others perhaps, from `unit`."""
    after = {unit}
    for stage in graph.order:
        if any(e.src.unit in after for e in graph.inputs(stage)):
            after.add(stage.unit)
    return after - {unit}
