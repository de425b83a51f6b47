"""Positions: where in the pipeline a rank stands, and in which order it takes its turns there.

A position is a set of ranks that the path through the stage graph does not leave for good until it is through with
them. Mostly it is one TP group. If the path goes round several TP groups again and again, as it does over the chunks
of interleaved pipelines, those groups are the *places* of one position, and the stages of one visit to a group a
*part*: part k sits on place k % num_places and is chunk k // num_places there.

A position counts its turns in *waves*: mostly one microbatch of its units, see `pacing`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mmtrain.program.ir.graph import StageGraph, StageId
from mmtrain.program.schedules.unit_pacing import ConsumerDemand, UnitPace, pace_units, warmup_waves

IntArray = npt.NDArray[np.int64]


class ScheduledPass(NamedTuple):
    """A rank runs the forward, or the backward, of one of its chunks for the microbatches due in one wave."""

    is_forward: bool
    chunk: int
    wave: int


@dataclass(frozen=True)
class PipelinePosition:
    """Parts on one place or round several, for steps of `num_waves` waves.

    `num_warmup_waves` counts the waves that must have left the position before the first of them comes back as a
    gradient and, so that nobody need wait, are under way when it does. `pacing` are those of the parts' units.
    """

    virtual_stages: tuple[tuple[StageId, ...], ...]
    num_pipeline_ranks: int
    num_waves: int
    num_warmup_waves: int
    pacing: Mapping[str, UnitPace]

    @property
    def num_chunks(self) -> int:
        """Chunks of a place. The last round need not reach every place; a place then passes its last turns over."""
        return -(-len(self.virtual_stages) // self.num_pipeline_ranks)

    def stages_at(self, place: int, chunk: int) -> tuple[StageId, ...]:
        """Stages of a chunk."""
        k = chunk * self.num_pipeline_ranks + place
        return self.virtual_stages[k] if k < len(self.virtual_stages) else ()

    def passes(self, place: int) -> list[ScheduledPass]:
        """Order a place's turns as (interleaved) 1F1B.

        Waves go in groups of `num_pipeline_ranks`; a group passes chunk after chunk, in backward from the last. The
        last place warms up with all forwards before the first that it can follow with a backward, (num_chunks - 1) *
        num_places with nothing after it, and every place with two more than the next one: its results take a turn to
        get there, and gradients a turn to get back. Then forwards and backwards alternate. (Megatron-LM, arXiv
        2104.04473, section 2.2; `num_warmup_waves` is ours.) If waves are missing in the last group, their turns are
        passed over: what is left of an order without deadlock has none, whereas with a smaller group places can wait
        for each other in a circle, which is why Megatron-LM refuses that.
        """
        return [
            ScheduledPass(bool(is_forward), chunk, wave) for is_forward, chunk, wave in self.pass_table(place).tolist()
        ]

    def pass_table(self, place: int) -> IntArray:
        """(turns, 3) of the same: whether it is a forward, chunk, wave."""
        slots, num = self._slots, len(self._slots)
        warm_up = min(self._lag + 2 * (self.num_pipeline_ranks - 1 - place), num)
        alternating = np.arange(num - warm_up)
        turns = np.empty((2 * num, 3), dtype=np.int64)
        at_forward = np.concatenate([np.arange(warm_up), warm_up + 2 * alternating])
        at_backward = np.concatenate([warm_up + 2 * alternating + 1, np.arange(2 * num - warm_up, 2 * num)])
        turns[at_forward, 0], turns[at_forward, 1:] = 1, slots
        turns[at_backward, 0] = 0
        turns[at_backward, 1], turns[at_backward, 2] = self.num_chunks - 1 - slots[:, 0], slots[:, 1]
        return turns[turns[:, 2] < self.num_waves]

    def warmup_depths(self) -> dict[StageId, int]:
        """Count, for each stage, the waves whose forward runs before the first one's backward, that one left out."""
        if self.num_pipeline_ranks == 1:
            return {stage: self.num_warmup_waves for part in self.virtual_stages for stage in part}
        return {
            stage: _most_live(np.where(forward, 1, -1)) - 1
            for place in range(self.num_pipeline_ranks)
            for chunk, forward, _ in self._by_chunk(place)
            for stage in self.stages_at(place, chunk)
        }

    @property
    def buffered_waves(self) -> int:
        """Waves that must be ready for a source that is as fast to keep up.

        Chunks take what a group of `num_pipeline_ranks` waves brings one after another, in the time in which such a
        source makes only the share of one chunk.
        """
        return max(1, self.num_pipeline_ranks - self.num_pipeline_ranks // self.num_chunks)

    def in_flight(self) -> dict[StageId, int]:
        """Count, for each stage, the microbatches that are between forward and backward at most."""
        peak: dict[StageId, int] = {}
        if self.num_pipeline_ranks == 1:
            for stage in (stage for part in self.virtual_stages for stage in part):
                pace = self.pacing[stage.unit]
                in_step = self.num_waves // pace.num_waves * pace.num_microbatches
                peak[stage] = min(pace.in_flight(self.num_warmup_waves), in_step)
            return peak
        for place in range(self.num_pipeline_ranks):
            for chunk, forward, wave in self._by_chunk(place):
                for stage in self.stages_at(place, chunk):
                    pace = self.pacing[stage.unit]
                    due = wave % pace.num_waves == np.where(forward, pace.due_at(True), pace.due_at(False))
                    peak[stage] = _most_live(pace.num_microbatches * due * np.where(forward, 1, -1))
        return peak

    def _by_chunk(self, place: int) -> Iterable[tuple[int, IntArray, IntArray]]:
        """Each chunk's turns: whether it is a forward, and the wave."""
        turns = self.pass_table(place)
        for chunk in range(self.num_chunks):
            is_forward, _, wave = turns[turns[:, 1] == chunk].T
            yield chunk, is_forward, wave

    @cached_property
    def _slots(self) -> IntArray:
        """(forwards, 2) chunk and wave of every forward in order, the last group filled up."""
        size, num_groups = self.num_pipeline_ranks, -(-self.num_waves // self.num_pipeline_ranks)
        group, chunk, at = np.indices((num_groups, self.num_chunks, size))
        return np.stack([chunk.ravel(), (group * size + at).ravel()], axis=1)

    @cached_property
    def _lag(self) -> int:
        """Forwards that the last place runs before it alternates."""
        last_chunk = np.flatnonzero(self._slots[:, 0] == self.num_chunks - 1)
        first_chunk = np.flatnonzero(self._slots[:, 0] == 0)  # in backward: the last chunk's
        last = len(last_chunk) - 1
        ready = last_chunk[np.minimum(np.arange(len(first_chunk)) + self.num_warmup_waves, last)]
        return int((ready - first_chunk).max())


def _most_live(change: IntArray) -> int:
    """The largest running sum."""
    return int(np.cumsum(change).max(initial=0))


def find_positions(graph: StageGraph) -> list[PipelinePosition]:
    """Find the positions of a graph, each after all those it feeds."""
    reach = _reached(_neighbours(graph))
    demands: dict[StageId, ConsumerDemand] = {}
    found = []
    for stage in sorted(reach, key=lambda s: len(reach[s])):  # a later position reaches strictly less
        if stage in demands:
            continue
        here = [other for other in graph.order if other in reach[stage] and stage in reach[other]]
        num_waves, own = pace_units(graph, dict.fromkeys(s.unit for s in here))
        leaving = [e for other in here for e in graph.outputs(other) if e.dst not in here]
        ahead = max(
            *(pace.min_warmup_waves for pace in own.values()),
            *(warmup_waves(graph, e, own[e.src.unit], demands[e.dst]) for e in leaving),
            0,
        )
        position = PipelinePosition(*_parts(graph, here), num_waves, ahead, own)
        demands.update(
            {
                s: ConsumerDemand(own[s.unit], depth, position.buffered_waves)
                for s, depth in position.warmup_depths().items()
            }
        )
        found.append(position)
    return found


def _parts(graph: StageGraph, stages: Sequence[StageId]) -> tuple[tuple[tuple[StageId, ...], ...], int]:
    """Parts of a position, and its number of places.

    Units that feed the same one, like two encoders, are visited one behind the other, as in the line of a unified
    pipeline, or side by side. TP groups that the path visits in no regular round either way are one place, which then
    runs one wave at a time.
    """
    line = {mesh.unit: at for at, mesh in enumerate(graph.meshes)}
    by_unit = sorted(stages, key=lambda s: line[s.unit])
    for path in (by_unit, stages) if _flows_down(graph, by_unit) else (stages,):
        visits = [(tp_groups, tuple(part)) for tp_groups, part in groupby(path, key=lambda s: graph.stage(s).tp_groups)]
        round_ = list(dict.fromkeys(tp_groups for tp_groups, _ in visits))
        ranks = [rank for tp_groups in round_ for tp_group in tp_groups for rank in tp_group]
        regular = all(tp_groups == round_[at % len(round_)] for at, (tp_groups, _) in enumerate(visits))
        if regular and len(ranks) == len(set(ranks)):
            return tuple(part for _, part in visits), len(round_)
    return (tuple(stages),), 1


def _flows_down(graph: StageGraph, path: Sequence[StageId]) -> bool:
    """Whether every stage of the path comes after those of it that feed it."""
    at = {stage: k for k, stage in enumerate(path)}
    return all(at[e.src] < at[stage] for stage in path for e in graph.inputs(stage) if e.src in at)


def _neighbours(graph: StageGraph) -> dict[StageId, set[StageId]]:
    """Stages that each stage feeds or shares a rank with."""
    by_rank: dict[int, set[StageId]] = {}
    for stage in graph.stages:
        for tp_group in stage.tp_groups:
            for rank in tp_group:
                by_rank.setdefault(rank, set()).add(stage.id)
    joined = {s.id: {e.dst for e in graph.outputs(s.id)} for s in graph.stages}
    for together in by_rank.values():
        for sid in together:
            joined[sid] |= together
    return joined


def _reached(joined: Mapping[StageId, Iterable[StageId]]) -> dict[StageId, set[StageId]]:
    """Stages to which a way leads from each, itself included: Warshall's closure, a set being the bits of a number."""
    stages = list(joined)
    bit = {stage: 1 << at for at, stage in enumerate(stages)}
    reach = [bit[stage] | sum(bit[other] for other in set(joined[stage]) - {stage}) for stage in stages]
    for at, stage in enumerate(stages):
        here, onwards = bit[stage], reach[at]
        reach = [bits | onwards if bits & here else bits for bits in reach]
    return {stage: {s for s in stages if bits & bit[s]} for stage, bits in zip(stages, reach, strict=True)}
