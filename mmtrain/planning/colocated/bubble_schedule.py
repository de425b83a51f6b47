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

Recipes schedule all encoders together with `schedule_encoders`, fixed kernel tables (`scripts/kernel_tables`) their
one encoder with `schedule_encoder`; both place kernels by the same functions. In a recipe every encoder pipeline has an
equal share of the microbatches; for a table the shares are searched. Only tables have several encoder TP groups on an
LLM pipeline rank, cuttable kernels and transfer times.

Time 0 is the start of the LLM's first forward; in a recipe it is the start of the LLM's step, which gathers parameters
first, so that the exposed all-gather is free time of the timeline and `gather` is 0.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    gather: float  # all-gather of parameters that is exposed before the first forward
    scatter: float  # reduce-scatter of gradients that is exposed after the last backward
    first_forwards: FloatArray  # F: (microbatches,) when the LLM's first stage starts each
    last_backwards: FloatArray  # B: (microbatches,) when the LLM's first stage has ended each
    transfer: float  # of a microbatch between two pipeline ranks

    @property
    def step_time(self) -> float:
        """T: the step of the LLM alone."""
        return self.gather + self.end + self.scatter


@dataclass(frozen=True)
class EncoderPlan:
    """Mesh sizes of an encoder on the ranks of one LLM replica, and its kernels for one LLM microbatch."""

    tp: int
    pp: int
    tp_groups_per_rank: int  # tensor-parallel groups of the encoder on one pipeline rank of the LLM
    forward: StageKernelLists  # (pp,) stages
    backward: StageKernelLists  # (pp,) stages, each from its last layer to its first; () if nothing trains
    cut_cost: float = 0.0  # share of a kernel's duration that each cut of it adds

    def num_pipelines(self, llm: LlmTimeline) -> int:
        """Return m: how many encoder pipelines share the LLM's microbatches."""
        return len(llm.free_times) // self.pp * self.tp_groups_per_rank

    def llm_pipeline_rank(self, pipeline: int, stage: int) -> int:
        """Return the LLM's pipeline rank that holds a stage of an encoder pipeline."""
        return pipeline // self.tp_groups_per_rank * self.pp + stage


@dataclass(frozen=True)
class EncoderSchedule:
    """Every kernel of an encoder in time; the labels of its chains are microbatches."""

    llm: LlmTimeline
    plan: EncoderPlan
    owner: IntArray  # (microbatches,) encoder pipeline that computes each
    forward: Mapping[tuple[int, int], PlacedKernels]  # by (encoder pipeline, stage)
    backward: Mapping[tuple[int, int], PlacedKernels]
    forward_ends: FloatArray  # EF: (microbatches,) when the LLM's first pipeline rank has the encoder's output
    head: float  # how long before the LLM's first forward the first kernel starts
    tail: float  # how long after the LLM's last backward the last kernel ends

    @property
    def step_time(self) -> float:
        """The step of the encoder and the LLM together."""
        return step_time_around(self.llm, self.head, self.tail)


def step_time_around(llm: LlmTimeline, head: float, tail: float) -> float:
    """Return the step time when encoders start `head` before the LLM and end `tail` after it."""
    return llm.end + max(head, llm.gather) + max(tail, llm.scatter)


@dataclass(frozen=True)
class EncoderWork:
    """An encoder whose pipelines know their microbatches, and when the LLM needs each and has ended it."""

    llm: LlmTimeline  # the same free times for all encoders; deadlines and releases are those of this one
    plan: EncoderPlan
    owner: IntArray  # (microbatches,) encoder pipeline that computes each


def schedule_encoder(
    llm: LlmTimeline, plan: EncoderPlan, owner: IntArray, *, renumber: bool = False
) -> EncoderSchedule:
    """Place all kernels of one encoder whose pipelines know their microbatches.

    Args:
        llm: the LLM's timeline.
        plan: the encoder's mesh and kernels.
        owner: (microbatches,) encoder pipeline that computes each.
        renumber: let the i-th forward to end become LLM microbatch i, samples included; else microbatches keep their
            numbers, whichever ends first.
    """
    work = EncoderWork(llm, plan, owner)
    (forward,) = _place_forwards([work])
    if renumber:
        order = np.argsort(forward.ends, kind="stable")
        new_label = np.argsort(order)
        placed_by_stage = {
            key: replace(placed, labels=new_label[placed.labels]) for key, placed in forward.placed.items()
        }
        forward = replace(forward, placed=placed_by_stage, ends=forward.ends[order])
        work = replace(work, owner=owner[order])
    (backward,) = _place_backwards([work], [forward])
    return _schedule_of(work, forward, backward)


def schedule_encoders(works: Sequence[EncoderWork]) -> tuple[EncoderSchedule, ...]:
    """Place the kernels of several encoders on the ranks of one LLM, as if they were those of one encoder.

    Encoders do not depend on each other, so on each rank their kernels compete for the same free time. The microbatch
    that the LLM needs first comes first, whichever encoder computes it. All forwards come before the first backward.
    """
    if not works:
        return ()
    assert all(work.plan.tp_groups_per_rank == 1 for work in works), "kernels share ranks, not TP groups"
    forwards = _place_forwards(works)
    backwards = _place_backwards(works, forwards)
    return tuple(itertools.starmap(_schedule_of, zip(works, forwards, backwards, strict=True)))


@dataclass(frozen=True)
class _PlacedForwards:
    """The forwards of an encoder in time."""

    placed: PlacedByStage
    ends: FloatArray  # (microbatches,) when the LLM's first pipeline rank has the output
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
        forward_ends=forward.ends,
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

    @property
    def is_next_to_llm(self) -> bool:
        return self.stage == self.work.plan.pp - 1

    @property
    def to_llm(self) -> float:
        """Transfer time of a microbatch between the pipeline's last stage and the LLM."""
        return _transfer_to_llm(self.work.llm, self.work.plan, self.pipeline)

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
        for group in range(works[0].plan.tp_groups_per_rank):
            turns = []
            for number, work in enumerate(works):
                pipeline = rank // work.plan.pp * work.plan.tp_groups_per_rank + group
                turns.append(_StageTurn(number, work, pipeline, rank % work.plan.pp))
            yield works[0].llm.free_times[rank], turns


def _place_forwards(works: Sequence[EncoderWork]) -> list[_PlacedForwards]:
    """Place forwards as late as they fit."""
    kernels_of = [_concatenate_layers(work.plan.forward) for work in works]
    placed_of: list[PlacedByStage] = [{} for _ in works]
    ends = [np.empty(len(work.owner)) for work in works]
    dues = [work.llm.first_forwards.copy() for work in works]  # (microbatches,) of the stage that is next
    heads = [0.0 for _ in works]
    for free_time, turns in _turns_by_rank(works):
        waiting: list[tuple[float, int, int, KernelChain]] = []
        for turn in turns:
            own, due = turn.microbatches, dues[turn.number]
            if turn.is_next_to_llm:
                due[own] -= turn.to_llm
            kernels = kernels_of[turn.number][turn.stage].time_reversed()
            needed = turn.work.llm.first_forwards
            for mb in own:
                chain = KernelChain(turn.label(mb), -float(due[mb]), kernels)
                waiting.append((-float(needed[mb]), -mb, turn.number, chain))
        waiting.sort(key=lambda item: item[:3])
        chains = [chain for *_, chain in waiting]
        placed, negated_starts = place_kernels(free_time.time_reversed(), chains, works[0].plan.cut_cost)
        for turn in turns:
            own, number = turn.microbatches, turn.number
            num_kernels = len(kernels_of[number][turn.stage].durations)
            placed_of[number][turn.key] = turn.of_encoder(placed).time_reversed(num_kernels)
            if turn.is_next_to_llm:
                ends[number][own] = _chain_ends(placed_of[number][turn.key], own) + turn.to_llm
            for mb in own:
                start = -negated_starts[turn.label(mb)]
                dues[number][mb] = start - turn.work.llm.transfer
                heads[number] = max(heads[number], -start)
    return list(itertools.starmap(_PlacedForwards, zip(placed_of, ends, heads, strict=True)))


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
            if turn.is_next_to_llm:
                release[turn.microbatches] += turn.to_llm
            kernels = kernels_of[turn.number][turn.stage]
            chains += [KernelChain(turn.label(mb), float(release[mb]), kernels) for mb in turn.microbatches]
        chains.sort(key=lambda chain: chain.release)
        placed, ends = place_kernels(free_time, chains, works[0].plan.cut_cost)
        for turn in trained:
            placed_of[turn.number][turn.key] = turn.of_encoder(placed)
            for mb in turn.microbatches:
                end = ends[turn.label(mb)]
                releases[turn.number][mb] = end + turn.work.llm.transfer
                tails[turn.number] = max(tails[turn.number], end - turn.work.llm.end)
    return list(itertools.starmap(_PlacedBackwards, zip(placed_of, tails, strict=True)))


def _transfer_to_llm(llm: LlmTimeline, plan: EncoderPlan, pipeline: int) -> float:
    """Return the transfer time between an encoder pipeline's last stage and the LLM's first pipeline rank."""
    return llm.transfer if plan.llm_pipeline_rank(pipeline, plan.pp - 1) > 0 else 0.0


def _chain_ends(placed: PlacedKernels, microbatches: Sequence[int]) -> FloatArray:
    """Return when the last kernel of each chain ends."""
    return np.array([placed.spans[placed.labels == mb, 1].max() for mb in microbatches])


def _concatenate_layers(stages: Sequence[Sequence[KernelSequence]]) -> list[KernelSequence]:
    """Return each stage's kernels as one sequence."""
    return [KernelSequence.concatenate(layers) for layers in stages]
