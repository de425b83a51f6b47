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

Recipes and fixed kernel tables (`scripts/kernel_tables`) both schedule with `schedule_encoder`. In a recipe every
encoder pipeline has an equal share of the microbatches; for a table the shares are searched. Only tables have several
encoder TP groups on an LLM pipeline rank, cuttable kernels and transfer times.

Time 0 is the start of the LLM's first forward; in a recipe it is the start of the LLM's step, which gathers parameters
first, so that the exposed all-gather is free time of the timeline and `gather` is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from mmtrain.plan.colocated.bubbles import (
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


def schedule_encoder(
    llm: LlmTimeline, plan: EncoderPlan, owner: IntArray, *, renumber: bool = False
) -> EncoderSchedule:
    """Place all kernels of an encoder whose pipelines know their microbatches.

    Args:
        llm: the LLM's timeline.
        plan: the encoder's mesh and kernels.
        owner: (microbatches,) encoder pipeline that computes each.
        renumber: let the i-th forward to end become LLM microbatch i, samples included; else microbatches keep their
            numbers, whichever ends first.
    """
    forward, ends, head = _place_forwards(llm, plan, owner)
    if renumber:
        order = np.argsort(ends, kind="stable")
        new_label = np.argsort(order)
        forward = {key: replace(placed, labels=new_label[placed.labels]) for key, placed in forward.items()}
        owner, ends = owner[order], ends[order]
    backward, tail = _place_backwards(llm, plan, owner, forward)
    return EncoderSchedule(llm, plan, owner, forward, backward, ends, head, tail)


def _place_forwards(llm: LlmTimeline, plan: EncoderPlan, owner: IntArray) -> tuple[PlacedByStage, FloatArray, float]:
    """Place forwards as late as they fit; return them, (microbatches,) their ends at the LLM, and the head."""
    kernels_by_stage = _concatenate_layers(plan.forward)
    placed_by_stage: PlacedByStage = {}
    ends = np.empty(len(owner))
    head = 0.0
    for pipeline in range(plan.num_pipelines(llm)):
        microbatches = np.flatnonzero(owner == pipeline)
        to_llm = _transfer_to_llm(llm, plan, pipeline)
        due = llm.first_forwards[microbatches] - to_llm
        for stage in reversed(range(plan.pp)):
            kernels = kernels_by_stage[stage]
            reversed_kernels = kernels.time_reversed()
            chains = [
                KernelChain(int(mb), -float(t), reversed_kernels) for mb, t in zip(microbatches, due, strict=True)
            ]
            free_time = llm.free_times[plan.llm_pipeline_rank(pipeline, stage)].time_reversed()
            placed, negated_start = place_kernels(free_time, chains[::-1], plan.cut_cost)
            placed_by_stage[pipeline, stage] = placed.time_reversed(len(kernels.durations))
            if stage == plan.pp - 1:
                ends[microbatches] = _chain_ends(placed_by_stage[pipeline, stage], microbatches) + to_llm
            due = np.array([-negated_start[int(mb)] for mb in microbatches]) - llm.transfer
        head = max(head, *(-due - llm.transfer), 0.0)
    return placed_by_stage, ends, head


def _place_backwards(
    llm: LlmTimeline, plan: EncoderPlan, owner: IntArray, forward: PlacedByStage
) -> tuple[PlacedByStage, float]:
    """Place backwards as early as they fit beside the forwards; return them and the tail."""
    if not plan.backward:
        return {}, 0.0
    kernels_by_stage = _concatenate_layers(plan.backward)
    placed_by_stage: PlacedByStage = {}
    tail = 0.0
    for pipeline in range(plan.num_pipelines(llm)):
        microbatches = np.flatnonzero(owner == pipeline)
        release = llm.last_backwards[microbatches] + _transfer_to_llm(llm, plan, pipeline)
        for stage in reversed(range(plan.pp)):
            chains = [
                KernelChain(int(microbatches[k]), float(release[k]), kernels_by_stage[stage])
                for k in np.argsort(release, kind="stable")
            ]
            free_time = llm.free_times[plan.llm_pipeline_rank(pipeline, stage)].without(forward[pipeline, stage])
            placed_by_stage[pipeline, stage], end = place_kernels(free_time, chains, plan.cut_cost)
            release = np.array([end[int(mb)] for mb in microbatches]) + llm.transfer
        tail = max(tail, *(release - llm.transfer - llm.end), 0.0)
    return placed_by_stage, tail


def _transfer_to_llm(llm: LlmTimeline, plan: EncoderPlan, pipeline: int) -> float:
    """Return the transfer time between an encoder pipeline's last stage and the LLM's first pipeline rank."""
    return llm.transfer if plan.llm_pipeline_rank(pipeline, plan.pp - 1) > 0 else 0.0


def _chain_ends(placed: PlacedKernels, microbatches: IntArray) -> FloatArray:
    """Return when the last kernel of each chain ends."""
    return np.array([placed.spans[placed.labels == mb, 1].max() for mb in microbatches])


def _concatenate_layers(stages: Sequence[Sequence[KernelSequence]]) -> list[KernelSequence]:
    """Return each stage's kernels as one sequence."""
    return [KernelSequence.concatenate(layers) for layers in stages]
