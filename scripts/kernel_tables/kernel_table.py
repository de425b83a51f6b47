"""A table of kernel times for an LLM and an encoder on the ranks of one LLM replica, and the steps of its baselines.

A table is JSON: `llm` (layers, tp, pp, vpp and a layer's kernels), `encoder` (layers, and a layer's kernels by tp),
`p2p_ms`, `microbatches`, `exposed_dp_ms`. Kernels are `["compute" | "collective", ms]` in the order in which they run.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from mmtrain.planning.colocated.bubble_schedule import EncoderPlan, LlmTimeline
from mmtrain.planning.colocated.bubbles import FloatArray, FreeTime, KernelSequence
from mmtrain.planning.layer_costs.min_max_partition import min_max_partition
from scripts.kernel_tables.interleaved_timeline import InterleavedPipeline, InterleavedTimeline, simulate_interleaved

CUT_COST = 0.03  # share of a kernel's duration that each cut of it adds; an assumption of the tables, not measured


@dataclass(frozen=True)
class LayerKernels:
    """A layer's kernels in both directions, in the order in which they run."""

    forward: KernelSequence
    backward: KernelSequence


@dataclass(frozen=True)
class KernelTable:
    """The mesh and layers of an LLM and an encoder, and kernel times in milliseconds."""

    pp: int
    vpp: int
    tp: int
    llm_layers: int
    llm: LayerKernels
    encoder_layers: int
    encoder: dict[int, LayerKernels]  # by tp
    transfer: float
    gather: float
    scatter: float
    microbatches: tuple[int, ...]  # numbers of microbatches in a step to evaluate

    @property
    def layers_per_chunk(self) -> int:
        """Layers of the LLM in each model chunk."""
        return self.llm_layers // (self.pp * self.vpp)

    def pipeline(self, num_microbatches: int) -> InterleavedPipeline:
        """Return the pipeline of the LLM alone, with equally many layers in every model chunk."""
        num_chunks = self.pp * self.vpp
        forward = self.layers_per_chunk * self.llm.forward.latency
        backward = self.layers_per_chunk * self.llm.backward.latency
        return InterleavedPipeline(
            self.pp, self.vpp, num_microbatches, (forward,) * num_chunks, (backward,) * num_chunks, self.transfer
        )

    def llm_timeline(self, num_microbatches: int) -> LlmTimeline:
        """Simulate the LLM alone and return its timeline, with free time between its kernels."""
        timeline = simulate_interleaved(self.pipeline(num_microbatches))
        return LlmTimeline(
            free_times=tuple(self._free_time(timeline, rank) for rank in range(self.pp)),
            end=timeline.end,
            gather=self.gather,
            scatter=self.scatter,
            first_forwards=timeline.first_forwards(),
            last_backwards=timeline.last_backwards(),
            transfer=self.transfer,
        )

    def encoder_plans(self) -> list[EncoderPlan]:
        """Return all encoder plans whose pp and tp divide the LLM's."""
        forward = self.llm.forward
        longest_bubble = max(d for d, computes in zip(forward.durations, forward.computes, strict=True) if not computes)
        return [
            self._encoder_plan(tp, pp, longest_bubble)
            for tp in self.encoder
            for pp in range(1, min(self.pp, self.encoder_layers) + 1)
            if self.tp % tp == 0 and self.pp % pp == 0
        ]

    def _encoder_plan(self, tp: int, pp: int, longest_bubble: float) -> EncoderPlan:
        """Return the plan with these sizes; kernels that fit into no tensor-parallel bubble may be cut."""
        kernels = self.encoder[tp]
        forward = KernelSequence.of(kernels.forward.durations, kernels.forward.computes, longest_bubble)
        backward = KernelSequence.of(kernels.backward.durations, kernels.backward.computes, longest_bubble)
        bounds = [self.encoder_layers * k // pp for k in range(pp + 1)]
        layers_per_stage = [hi - lo for lo, hi in pairwise(bounds)]
        return EncoderPlan(
            tp=tp,
            pp=pp,
            tp_groups_per_rank=self.tp // tp,
            forward=tuple((forward,) * num_layers for num_layers in layers_per_stage),
            backward=tuple((backward,) * num_layers for num_layers in layers_per_stage),
            cut_cost=CUT_COST,
        )

    def _free_time(self, timeline: InterleavedTimeline, rank: int) -> FreeTime:
        """Return when a pipeline rank of the LLM, and its tensor-parallel link, are free."""
        is_forward = np.array([forward for forward, _, _ in timeline.order[rank]])
        busy, link = [], []
        for kernels, selected in ((self.llm.forward, is_forward), (self.llm.backward, ~is_forward)):
            spans = _back_to_back(kernels)
            computes = np.array(kernels.computes)
            for layer in range(self.layers_per_chunk):
                starts = timeline.start[rank][selected, None, None] + layer * kernels.latency
                busy.append((starts + spans[computes]).reshape(-1, 2))
                link.append((starts + spans[~computes]).reshape(-1, 2))
        return FreeTime.around(np.concatenate(busy), np.concatenate(link))


def read_table(path: Path) -> KernelTable:
    """Read a table of kernels from its JSON file."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    llm, encoder = raw["llm"], raw["encoder"]
    return KernelTable(
        pp=llm["pp"],
        vpp=llm["vpp"],
        tp=llm["tp"],
        llm_layers=llm["layers"],
        llm=_read_layer(llm["layer"]),
        encoder_layers=encoder["layers"],
        encoder={int(tp): _read_layer(layer) for tp, layer in encoder["layer_by_tp"].items()},
        transfer=raw["p2p_ms"],
        gather=raw["exposed_dp_ms"]["all_gather"],
        scatter=raw["exposed_dp_ms"]["reduce_scatter"],
        microbatches=tuple(raw["microbatches"]),
    )


def megatron_step_ms(table: KernelTable, num_microbatches: int) -> float:
    """Return the step with the whole encoder in front of the LLM's first stage, under the LLM's tp."""
    llm = table.pipeline(num_microbatches)
    encoder = table.encoder[table.tp]
    forward, backward = list(llm.forward), list(llm.backward)
    forward[0] += table.encoder_layers * encoder.forward.latency
    backward[0] += table.encoder_layers * encoder.backward.latency
    return _pipeline_step_ms(table, num_microbatches, table.vpp, forward, backward)


def balanced_step_ms(table: KernelTable, num_microbatches: int) -> float:
    """Return the step of one pipeline over all layers, cut by the exact min-max, with the best number of chunks."""
    encoder = table.encoder[table.tp]
    forward = [encoder.forward.latency] * table.encoder_layers + [table.llm.forward.latency] * table.llm_layers
    backward = [encoder.backward.latency] * table.encoder_layers + [table.llm.backward.latency] * table.llm_layers
    seconds_by_layer = [f + b for f, b in zip(forward, backward, strict=True)]
    steps = []
    for vpp in (v for v in range(1, table.vpp + 1) if table.vpp % v == 0):
        bounds = min_max_partition(seconds_by_layer, table.pp * vpp)
        assert bounds is not None, "there are more layers than stages"
        chunks = list(pairwise(bounds))
        chunk_forward = [sum(forward[lo:hi]) for lo, hi in chunks]
        chunk_backward = [sum(backward[lo:hi]) for lo, hi in chunks]
        steps.append(_pipeline_step_ms(table, num_microbatches, vpp, chunk_forward, chunk_backward))
    return min(steps)


def _pipeline_step_ms(
    table: KernelTable, num_microbatches: int, vpp: int, forward: Sequence[float], backward: Sequence[float]
) -> float:
    pipeline = InterleavedPipeline(table.pp, vpp, num_microbatches, tuple(forward), tuple(backward), table.transfer)
    return table.gather + simulate_interleaved(pipeline).end + table.scatter


def _read_layer(raw: dict[str, list[tuple[str, float]]]) -> LayerKernels:
    return LayerKernels(_read_kernels(raw["forward"]), _read_kernels(raw["backward"]))


def _read_kernels(raw: Sequence[tuple[str, float]]) -> KernelSequence:
    return KernelSequence.of([ms for _, ms in raw], [kind == "compute" for kind, _ in raw])


def _back_to_back(kernels: KernelSequence) -> FloatArray:
    """Return (n, 2) start and end of kernels that follow each other without a gap, from 0 on."""
    ends = np.cumsum(kernels.durations)
    return np.stack([ends - kernels.durations, ends], axis=1)
