"""Place an encoder's kernels in the bubbles of an LLM on the same ranks.

The idea is that of Optimus (arXiv 2408.03505): the LLM's plan is fixed and its timeline known. An encoder has a plan of
its own whose pp and tp divide the LLM's, so m encoder pipelines lie on the ranks of one LLM pipeline and share its
microbatches. A forward must end before the LLM's first stage starts its microbatch (at F), a backward starts when that
stage has ended it (at B). Kernels for which there is no bubble run before and after the LLM, and only they lengthen
the step.

Optimus moves one microbatch after another into bubbles. Here the two halves are mirror images instead: backwards are
placed as early as they fit, from B on; forwards as late as they fit, which is the same with time running backwards,
from F on. The earliest forward then says how long before the LLM a step starts (`head`), the latest backward how long
after it the step ends (`tail`).

Every encoder pipeline has an equal share of the microbatches. Time 0 is the start of the LLM's step, which gathers
parameters first, so that the exposed all-gather is free time of the timeline.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mmtrain.planning.colocated.bubbles import (
    FloatArray,
    FreeTime,
    KernelChain,
    KernelSequence,
    PlacedKernels,
    place_kernels,
)

IntArray = npt.NDArray[np.int64]
StageKernelLists = tuple[tuple[KernelSequence, ...], ...]  # by stage, by layer in the order in which layers run
PlacedByStage = dict[tuple[int, int], PlacedKernels]  # by (encoder pipeline, stage)
_LABELS_PER_ENCODER = 1 << 32  # more than the microbatches of any step


@dataclass(frozen=True)
class LlmTimeline:
    """The timeline of one LLM replica as far as an encoder on its ranks depends on it."""

    free_times: tuple[FreeTime, ...]  # of each pipeline rank; all ranks of its tensor-parallel group have the same
    end: float  # of the last backward
    first_forwards: FloatArray  # F: (microbatches,) when the LLM's first stage starts each
    last_backwards: FloatArray  # B: (microbatches,) when the LLM's first stage has ended each


@dataclass(frozen=True)
class EncoderPlan:
    """The stages of an encoder on the ranks of one LLM replica, and their kernels for one microbatch."""

    pp: int
    forward: StageKernelLists  # (pp,) stages
    backward: StageKernelLists  # (pp,) stages, each from its last layer to its first; () if nothing trains

    def num_pipelines(self, llm: LlmTimeline) -> int:
        """Return m: how many encoder pipelines share the LLM's microbatches."""
        return len(llm.free_times) // self.pp

    def llm_pipeline_rank(self, pipeline: int, stage: int) -> int:
        """Return the LLM's pipeline rank that holds a stage of an encoder pipeline."""
        return pipeline * self.pp + stage


@dataclass(frozen=True)
class EncoderSchedule:
    """Every kernel of an encoder in time; the labels of its chains are microbatches."""

    llm: LlmTimeline
    plan: EncoderPlan
    owner: IntArray  # (microbatches,) encoder pipeline that computes each
    forward: Mapping[tuple[int, int], PlacedKernels]  # by (encoder pipeline, stage)
    backward: Mapping[tuple[int, int], PlacedKernels]
    head: float  # how long before the LLM's step the first kernel starts
    tail: float  # how long after the LLM's last backward the last kernel ends


@dataclass(frozen=True)
class EncoderWork:
    """An encoder whose pipelines know their microbatches, and when the LLM needs each and has ended it."""

    llm: LlmTimeline  # the same free times for all encoders; deadlines and releases are those of this one
    plan: EncoderPlan
    owner: IntArray  # (microbatches,) encoder pipeline that computes each


def schedule_encoders(works: Sequence[EncoderWork]) -> tuple[EncoderSchedule, ...]:
    """Place the kernels of several encoders on the ranks of one LLM, as if they were those of one encoder.

    Encoders do not depend on each other, so on each rank their kernels compete for the same free time. The microbatch
    that the LLM needs first comes first, whichever encoder computes it. All forwards come before the first backward.
    """
    if not works:
        return ()
    forwards = _place_forwards(works)
    backwards = _place_backwards(works, forwards)
    return tuple(itertools.starmap(_schedule_of, zip(works, forwards, backwards, strict=True)))


@dataclass(frozen=True)
class _PlacedForwards:
    """The forwards of an encoder in time."""

    placed: PlacedByStage
    head: float


@dataclass(frozen=True)
class _PlacedBackwards:
    """The backwards of an encoder in time."""

    placed: PlacedByStage
    tail: float


def _schedule_of(work: EncoderWork, forward: _PlacedForwards, backward: _PlacedBackwards) -> EncoderSchedule:
    return EncoderSchedule(
        llm=work.llm,
        plan=work.plan,
        owner=work.owner,
        forward=forward.placed,
        backward=backward.placed,
        head=forward.head,
        tail=backward.tail,
    )


@dataclass(frozen=True)
class _StageTurn:
    """A stage of an encoder pipeline, when its kernels are placed."""

    number: int  # of the encoder
    work: EncoderWork
    pipeline: int
    stage: int

    @property
    def key(self) -> tuple[int, int]:
        return self.pipeline, self.stage

    @cached_property
    def microbatches(self) -> list[int]:
        return np.flatnonzero(self.work.owner == self.pipeline).tolist()

    def label(self, mb: int) -> int:
        """Return a number for a microbatch of this encoder that no other encoder has."""
        return self.number * _LABELS_PER_ENCODER + mb

    def of_encoder(self, placed: PlacedKernels) -> PlacedKernels:
        """Return the encoder's own kernels of all that were placed, labelled by microbatch."""
        is_own = placed.labels // _LABELS_PER_ENCODER == self.number
        labels = placed.labels[is_own] % _LABELS_PER_ENCODER
        return PlacedKernels(placed.spans[is_own], labels, placed.kernel_index[is_own], placed.computes[is_own])


def _turns_by_rank(works: Sequence[EncoderWork]) -> Iterator[tuple[FreeTime, list[_StageTurn]]]:
    """Yield free times and the stages that share them, from the LLM's last pipeline rank to its first.

    So a stage comes after the next one of its pipeline, which says when its forwards are due and its backwards start.
    """
    for rank in reversed(range(len(works[0].llm.free_times))):
        turns = [_StageTurn(number, work, *divmod(rank, work.plan.pp)) for number, work in enumerate(works)]
        yield works[0].llm.free_times[rank], turns


def _place_forwards(works: Sequence[EncoderWork]) -> list[_PlacedForwards]:
    """Place forwards as late as they fit."""
    kernels_of = [_concatenate_layers(work.plan.forward) for work in works]
    placed_of: list[PlacedByStage] = [{} for _ in works]
    dues = [work.llm.first_forwards.copy() for work in works]  # (microbatches,) of the stage that is next
    heads = [0.0 for _ in works]
    for free_time, turns in _turns_by_rank(works):
        waiting: list[tuple[float, int, int, KernelChain]] = []
        for turn in turns:
            own, due = turn.microbatches, dues[turn.number]
            kernels = kernels_of[turn.number][turn.stage].time_reversed()
            needed = turn.work.llm.first_forwards
            for mb in own:
                chain = KernelChain(turn.label(mb), -float(due[mb]), kernels)
                waiting.append((-float(needed[mb]), -mb, turn.number, chain))
        waiting.sort(key=lambda item: item[:3])
        chains = [chain for *_, chain in waiting]
        placed, negated_starts = place_kernels(free_time.time_reversed(), chains)
        for turn in turns:
            own, number = turn.microbatches, turn.number
            num_kernels = len(kernels_of[number][turn.stage].durations)
            placed_of[number][turn.key] = turn.of_encoder(placed).time_reversed(num_kernels)
            for mb in own:
                start = -negated_starts[turn.label(mb)]
                dues[number][mb] = start
                heads[number] = max(heads[number], -start)
    return list(itertools.starmap(_PlacedForwards, zip(placed_of, heads, strict=True)))


def _place_backwards(works: Sequence[EncoderWork], forwards: Sequence[_PlacedForwards]) -> list[_PlacedBackwards]:
    """Place backwards as early as they fit beside the forwards."""
    kernels_of = [_concatenate_layers(work.plan.backward) for work in works]
    placed_of: list[PlacedByStage] = [{} for _ in works]
    releases = [work.llm.last_backwards.copy() for work in works]  # (microbatches,) of the stage that is next
    tails = [0.0 for _ in works]
    for free_time, turns in _turns_by_rank(works):
        trained = [turn for turn in turns if turn.work.plan.backward]
        for turn in turns:
            free_time = free_time.without(forwards[turn.number].placed[turn.key])
        chains: list[KernelChain] = []
        for turn in trained:
            release = releases[turn.number]
            kernels = kernels_of[turn.number][turn.stage]
            chains += [KernelChain(turn.label(mb), float(release[mb]), kernels) for mb in turn.microbatches]
        chains.sort(key=lambda chain: chain.release)
        placed, ends = place_kernels(free_time, chains)
        for turn in trained:
            placed_of[turn.number][turn.key] = turn.of_encoder(placed)
            for mb in turn.microbatches:
                end = ends[turn.label(mb)]
                releases[turn.number][mb] = end
                tails[turn.number] = max(tails[turn.number], end - turn.work.llm.end)
    return list(itertools.starmap(_PlacedBackwards, zip(placed_of, tails, strict=True)))


def _concatenate_layers(stages: Sequence[Sequence[KernelSequence]]) -> list[KernelSequence]:
    """Return each stage's kernels as one sequence."""
    return [KernelSequence.concatenate(layers) for layers in stages]
