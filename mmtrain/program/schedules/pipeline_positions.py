"""Pipeline positions: where in the pipeline a rank stands, and in which order it runs its passes there.

A *position* is a group of ranks that microbatches visit one or more times before moving on: one TP group in plain 1F1B,
all ranks of an interleaved pipeline. Each TP group of a position is a *pipeline rank*. The stages of one visit are a
*virtual stage*, which is a model chunk of its pipeline rank. Virtual stage k is chunk k // num_pipeline_ranks of
pipeline rank k % num_pipeline_ranks. Four pipeline ranks with two chunks each hold eight virtual stages:

                  rank 0    rank 1    rank 2    rank 3
    chunk 0         0  --->   1  --->   2  --->   3  ---.
                .---------------------------------------'
    chunk 1     '-> 4  --->   5  --->   6  --->   7  ---> next position

A *wave* is what passes through a position together: mostly one microbatch of each of its units (see `unit_pacing`).
A step of four waves runs as follows on that position. `2a` is the forward of wave 2 for chunk 0, `2b` that for chunk 1;
capital letters are backwards. Each column is the time of one pass, and dots are waiting:

    rank 0      0a 1a 2a 3a 0b 1b 2b 3b .. .. .. 0B .. 1B .. 2B .. 3B 0A 1A 2A 3A
    rank 1      .. 0a 1a 2a 3a 0b 1b 2b 3b .. 0B .. 1B .. 2B .. 3B 0A 1A 2A 3A ..
    rank 2      .. .. 0a 1a 2a 3a 0b 1b 2b 0B 3b 1B .. 2B .. 3B 0A 1A 2A 3A .. ..
    rank 3      .. .. .. 0a 1a 2a 3a 0b 0B 1b 1B 2b 2B 3b 3B 0A 1A 2A 3A .. .. ..
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules.unit_pacing import ConsumerDemand, UnitPace, pace_units, warmup_waves

IntArray = npt.NDArray[np.int64]


class ScheduledPass(NamedTuple):
    """The forward, or the backward, of one chunk of a pipeline rank, for the microbatches due in one wave."""

    is_forward: bool
    chunk: int
    wave: int


@dataclass(frozen=True)
class PipelinePosition:
    """Virtual stages on one pipeline rank, or in rounds over several, for steps of `num_waves` waves.

    `num_warmup_waves` waves leave the position before the first of them comes back as a gradient. That is the number
    that must leave first, and more where ranks would otherwise wait. `pacing` holds the pace of each unit.
    """

    virtual_stages: tuple[tuple[StageId, ...], ...]
    num_pipeline_ranks: int
    num_waves: int
    num_warmup_waves: int
    pacing: Mapping[str, UnitPace]

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of a pipeline rank. If the last round does not reach a rank, the rank skips the last chunk."""
        return -(-len(self.virtual_stages) // self.num_pipeline_ranks)

    def stages_at(self, pipeline_rank: int, chunk: int) -> tuple[StageId, ...]:
        """Return the stages of a chunk."""
        number = chunk * self.num_pipeline_ranks + pipeline_rank
        return self.virtual_stages[number] if number < len(self.virtual_stages) else ()

    def passes(self, pipeline_rank: int) -> list[ScheduledPass]:
        """Order the passes of a pipeline rank as (interleaved) 1F1B (Megatron-LM, arXiv 2104.04473, section 2.2).

        Waves go in groups of `num_pipeline_ranks`. A group passes chunk after chunk; in backward, it starts with the
        last chunk. The last pipeline rank warms up with all forwards before the first that a backward can follow: with
        nothing after the position, (num_chunks - 1) * num_pipeline_ranks. Every other rank warms up with two forwards
        more than the next one: its results take one pass to get there, and gradients one pass to get back. Then
        forwards and backwards alternate. (`num_warmup_waves` generalizes Megatron-LM's warm-up.)

        If the last group lacks waves, their passes are skipped: what is left of an order without deadlock has none.
        With a smaller group instead, ranks can wait for each other in a cycle, which is why Megatron-LM rejects it.
        """
        table = self.pass_table(pipeline_rank).tolist()
        return [ScheduledPass(bool(is_forward), chunk, wave) for is_forward, chunk, wave in table]

    def pass_table(self, pipeline_rank: int) -> IntArray:
        """Return the same as `passes` in an array (passes, 3): whether it is a forward, chunk, wave."""
        slots, num = self._slots, len(self._slots)
        num_warmup = min(self._last_rank_warmup + 2 * (self.num_pipeline_ranks - 1 - pipeline_rank), num)
        alternating = np.arange(num - num_warmup)
        table = np.empty((2 * num, 3), dtype=np.int64)
        at_forward = np.concatenate([np.arange(num_warmup), num_warmup + 2 * alternating])
        at_backward = np.concatenate([num_warmup + 2 * alternating + 1, np.arange(2 * num - num_warmup, 2 * num)])
        table[at_forward, 0] = 1
        table[at_forward, 1:] = slots
        table[at_backward, 0] = 0
        table[at_backward, 1] = self.num_chunks - 1 - slots[:, 0]
        table[at_backward, 2] = slots[:, 1]
        return table[table[:, 2] < self.num_waves]

    def warmup_depths(self) -> dict[StageId, int]:
        """Return for each stage the number of waves whose forward runs before a backward, not counting its own."""
        if self.num_pipeline_ranks == 1:
            return {stage: self.num_warmup_waves for stages in self.virtual_stages for stage in stages}
        return {
            stage: self._most_waves[pipeline_rank][chunk] - 1
            for pipeline_rank in range(self.num_pipeline_ranks)
            for chunk in range(self.num_chunks)
            for stage in self.stages_at(pipeline_rank, chunk)
        }

    @property
    def buffered_waves(self) -> int:
        """Waves that must be ready for a source as fast as the position to keep up with it.

        The chunks consume a group of `num_pipeline_ranks` waves one after another; in the time of one chunk such a
        source makes only one chunk's share of a group.
        """
        return max(1, self.num_pipeline_ranks - self.num_pipeline_ranks // self.num_chunks)

    def in_flight(self) -> dict[StageId, int]:
        """Return for each stage the most microbatches that are between forward and backward."""
        peak: dict[StageId, int] = {}
        if self.num_pipeline_ranks == 1:
            for stage in (stage for stages in self.virtual_stages for stage in stages):
                pace = self.pacing[stage.unit]
                in_step = self.num_waves // pace.num_waves * pace.num_microbatches
                peak[stage] = min(pace.in_flight(self.num_warmup_waves), in_step)
            return peak
        for pipeline_rank, chunk in product(range(self.num_pipeline_ranks), range(self.num_chunks)):
            for stage in self.stages_at(pipeline_rank, chunk):
                pace = self.pacing[stage.unit]
                if pace.num_waves == 1:
                    peak[stage] = pace.num_microbatches * self._most_waves[pipeline_rank][chunk]
                else:
                    peak[stage] = self._most_microbatches(pipeline_rank, chunk, pace)
        return peak

    def _most_microbatches(self, pipeline_rank: int, chunk: int, pace: UnitPace) -> int:
        """Return the most microbatches between forward and backward of a unit whose blocks take several waves."""
        table = self.pass_table(pipeline_rank)
        is_forward, _, wave = table[table[:, 1] == chunk].T
        due = wave % pace.num_waves == np.where(is_forward, pace.due_at(True), pace.due_at(False))
        change = pace.num_microbatches * due * np.where(is_forward, 1, -1)
        return int(np.cumsum(change).max(initial=0))

    @cached_property
    def _most_waves(self) -> list[list[int]]:
        """By pipeline rank, then chunk: the most waves that are between forward and backward."""
        short = self._with_few_waves
        if short is not None:
            return short._most_waves
        most = []
        for pipeline_rank in range(self.num_pipeline_ranks):
            table = self.pass_table(pipeline_rank)
            by_chunk = table[np.argsort(table[:, 1], kind="stable")]
            # A chunk has as many forwards as backwards, so that every chunk starts at 0.
            running = np.cumsum(2 * by_chunk[:, 0] - 1)
            first_pass = np.searchsorted(by_chunk[:, 1], np.arange(self.num_chunks))
            most.append(np.maximum.reduceat(running, first_pass).tolist())
        return most

    @property
    def _with_few_waves(self) -> "PipelinePosition | None":
        """The same position in a step of fewer waves that holds as many at once; None if this step has no more.

        Once forwards and backwards alternate, everything repeats from group to group. A warm-up takes at most three
        groups more than `num_warmup_waves` fill: one that these begin, one for the chunks, and two passes for each
        further rank. One group is the period, and the last one may lack waves.
        """
        num_groups = -(-self.num_warmup_waves // self.num_pipeline_ranks) + 5
        enough = num_groups * self.num_pipeline_ranks
        return replace(self, num_waves=enough) if enough < self.num_waves else None

    @cached_property
    def _slots(self) -> IntArray:
        """Chunk and wave of every forward in order, (forwards, 2), as if the last group lacked no waves."""
        size, num_groups = self.num_pipeline_ranks, -(-self.num_waves // self.num_pipeline_ranks)
        slots = np.empty((num_groups, self.num_chunks, size, 2), dtype=np.int64)
        slots[..., 0] = np.arange(self.num_chunks)[:, None]
        slots[..., 1] = np.arange(num_groups * size).reshape(num_groups, 1, size)
        return slots.reshape(-1, 2)

    @cached_property
    def _last_rank_warmup(self) -> int:
        """Number of forwards that the last pipeline rank runs before it alternates."""
        last_chunk = np.flatnonzero(self._slots[:, 0] == self.num_chunks - 1)
        first_chunk = np.flatnonzero(self._slots[:, 0] == 0)  # in backward: the last chunk's
        last = len(last_chunk) - 1
        ready = last_chunk[np.minimum(np.arange(len(first_chunk)) + self.num_warmup_waves, last)]
        return int((ready - first_chunk).max())


def find_positions(graph: StageGraph) -> list[PipelinePosition]:
    """Return the positions of a graph, each after all positions that it feeds."""
    reachable = _reachable(_neighbors(graph))
    demands: dict[StageId, ConsumerDemand] = {}
    positions = []
    for stage in sorted(reachable, key=lambda s: len(reachable[s])):  # a later position reaches strictly fewer stages
        if stage in demands:
            continue
        members = [other for other in graph.order if other in reachable[stage] and stage in reachable[other]]
        num_waves, pacing = pace_units(graph, dict.fromkeys(s.unit for s in members))
        leaving = [e for member in members for e in graph.outputs(member) if e.dst not in members]
        num_warmup_waves = max(
            *(pace.min_warmup_waves for pace in pacing.values()),
            *(warmup_waves(graph, e, pacing[e.src.unit], demands[e.dst]) for e in leaving),
            0,
        )
        virtual_stages, num_pipeline_ranks = _virtual_stages(graph, members)
        position = PipelinePosition(virtual_stages, num_pipeline_ranks, num_waves, num_warmup_waves, pacing)
        for member, depth in position.warmup_depths().items():
            demands[member] = ConsumerDemand(pacing[member.unit], depth, position.buffered_waves)
        positions.append(position)
    return positions


def _virtual_stages(graph: StageGraph, stages: Sequence[StageId]) -> tuple[tuple[tuple[StageId, ...], ...], int]:
    """Return the virtual stages of a position, and its number of pipeline ranks.

    The path visits units that feed the same one, like two encoders, one after another, as in the chain of a unified
    pipeline, or side by side. TP groups of several units on the same ranks are one pipeline rank, whatever their sizes.
    If the path visits ranks in no regular round either way, they count as one pipeline rank, which then runs one wave
    at a time.
    """
    unit_order = {mesh.unit: place for place, mesh in enumerate(graph.meshes)}
    unit_after_unit = sorted(stages, key=lambda s: unit_order[s.unit])
    for path in (unit_after_unit, stages) if _flows_down(graph, unit_after_unit) else (stages,):
        visits = [(holders, tuple(part)) for holders, part in groupby(path, key=graph.ranks_holding)]
        round_ = list(dict.fromkeys(holders for holders, _ in visits))
        ranks = [rank for holders in round_ for rank in holders]
        is_regular = all(holders == round_[nth % len(round_)] for nth, (holders, _) in enumerate(visits))
        if is_regular and len(ranks) == len(set(ranks)):
            return tuple(part for _, part in visits), len(round_)
    return (tuple(stages),), 1


def _flows_down(graph: StageGraph, path: Sequence[StageId]) -> bool:
    """Return whether every stage of the path comes after those stages of the path that feed it."""
    place = {stage: k for k, stage in enumerate(path)}
    return all(place[e.src] < place[stage] for stage in path for e in graph.inputs(stage) if e.src in place)


def _neighbors(graph: StageGraph) -> dict[StageId, set[StageId]]:
    """Return for each stage those that it feeds or shares a rank with; all replica groups are alike."""
    by_rank: dict[int, set[StageId]] = {}
    for stage in graph.stages:
        for tp_group in stage.tp_groups[: graph.mesh(stage.id.unit).num_replicas // graph.num_groups]:
            for rank in tp_group:
                by_rank.setdefault(rank, set()).add(stage.id)
    neighbors = {s.id: {e.dst for e in graph.outputs(s.id)} for s in graph.stages}
    for stages_of_rank in by_rank.values():
        for sid in stages_of_rank:
            neighbors[sid] |= stages_of_rank
    return neighbors


def _reachable(neighbors: Mapping[StageId, Iterable[StageId]]) -> dict[StageId, set[StageId]]:
    """Return for each stage those to which a path leads, itself included.

    Warshall's transitive closure, with sets as the bits of integers.
    """
    stages = list(neighbors)
    bit = {stage: 1 << place for place, stage in enumerate(stages)}
    reach = [bit[stage] | sum(bit[other] for other in set(neighbors[stage]) - {stage}) for stage in stages]
    for place, stage in enumerate(stages):
        via, onwards = bit[stage], reach[place]
        reach = [bits | onwards if bits & via else bits for bits in reach]
    # In a pipeline with several chunks on a rank every stage reaches every other: few sets are different.
    members = {bits: {s for s in stages if bits & bit[s]} for bits in set(reach)}
    return {stage: members[bits] for stage, bits in zip(stages, reach, strict=True)}
