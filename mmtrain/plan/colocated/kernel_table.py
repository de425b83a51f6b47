"""Colocated placement on a given table of kernels, one LLM replica wide, and the baselines beside it.

A table is JSON: `llm` (layers, tp, pp, vpp and a layer's kernels), `encoder` (layers, and a layer's kernels by tp),
`p2p_ms`, `microbatches`, `exposed_dp_ms`. Kernels are `["compute" | "collective", ms]` in order.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from mmtrain.plan.colocated.bubble_schedule import EncoderPlan, LlmTimeline
from mmtrain.plan.colocated.bubbles import FloatArray, FreeTime, KernelSequence
from mmtrain.plan.colocated.llm_timeline import InterleavedPipeline, InterleavedTimeline, simulate_interleaved
from mmtrain.plan.search.min_max_partition import min_max_partition

CUT_COST = 0.03  # of a kernel, for each cut


@dataclass(frozen=True)
class LayerKernels:
    """A layer's kernels in both directions, in the order in which they run."""

    forward: KernelSequence
    backward: KernelSequence


@dataclass(frozen=True)
class KernelTable:
    """What kernels take, in milliseconds."""

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
    microbatches: tuple[int, ...]

    def pipeline(self, num_microbatches: int) -> InterleavedPipeline:
        """The LLM by itself, its layers shared out equally."""
        each, stages = self.llm_layers // (self.pp * self.vpp), self.pp * self.vpp
        forward, backward = each * self.llm.forward.latency, each * self.llm.backward.latency
        return InterleavedPipeline(
            self.pp, self.vpp, num_microbatches, (forward,) * stages, (backward,) * stages, self.transfer
        )

    def host(self, num_microbatches: int) -> LlmTimeline:
        """The LLM's timeline, with bubbles between its kernels."""
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
        """All plans whose pp and tp divide the LLM's."""
        bubble = max(d for d, c in zip(self.llm.forward.durations, self.llm.forward.computes, strict=True) if not c)
        return [
            self._encoder_plan(tp, pp, bubble)
            for tp in self.encoder
            for pp in range(1, min(self.pp, self.encoder_layers) + 1)
            if self.tp % tp == 0 and self.pp % pp == 0
        ]

    def _encoder_plan(self, tp: int, pp: int, bubble: float) -> EncoderPlan:
        cuts = [self.encoder_layers * k // pp for k in range(pp + 1)]
        forward, backward = (
            KernelSequence.of(k.durations, k.computes, cut_above=bubble)
            for k in (self.encoder[tp].forward, self.encoder[tp].backward)
        )
        sizes = [hi - lo for lo, hi in pairwise(cuts)]
        return EncoderPlan(
            tp,
            pp,
            self.tp // tp,
            tuple((forward,) * size for size in sizes),
            tuple((backward,) * size for size in sizes),
            CUT_COST,
        )

    def _free_time(self, timeline: InterleavedTimeline, rank: int) -> FreeTime:
        forward = np.array([is_forward for is_forward, _, _ in timeline.order[rank]])
        each = self.llm_layers // (self.pp * self.vpp)
        busy, link = [], []
        for kernels, which in ((self.llm.forward, forward), (self.llm.backward, ~forward)):
            spans = _back_to_back(kernels)
            computes = np.array(kernels.computes)
            for layer in range(each):
                starts = timeline.start[rank][which, None, None] + layer * kernels.latency
                busy.append((starts + spans[computes]).reshape(-1, 2))
                link.append((starts + spans[~computes]).reshape(-1, 2))
        return FreeTime.around(np.concatenate(busy), np.concatenate(link))


def read_table(path: Path) -> KernelTable:
    """Read a table of kernels from its file."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    llm, encoder = raw["llm"], raw["encoder"]
    return KernelTable(
        pp=llm["pp"],
        vpp=llm["vpp"],
        tp=llm["tp"],
        llm_layers=llm["layers"],
        llm=_layer(llm["layer"]),
        encoder_layers=encoder["layers"],
        encoder={int(tp): _layer(layer) for tp, layer in encoder["layer_by_tp"].items()},
        transfer=raw["p2p_ms"],
        gather=raw["exposed_dp_ms"]["all_gather"],
        scatter=raw["exposed_dp_ms"]["reduce_scatter"],
        microbatches=tuple(raw["microbatches"]),
    )


def megatron_step_ms(table: KernelTable, num_microbatches: int) -> float:
    """Milliseconds with the whole encoder in front of the LLM's first stage, under the LLM's tp."""
    alone, encoder = table.pipeline(num_microbatches), table.encoder[table.tp]
    forward, backward = list(alone.forward), list(alone.backward)
    forward[0] += table.encoder_layers * encoder.forward.latency
    backward[0] += table.encoder_layers * encoder.backward.latency
    return _pipeline_step(table, num_microbatches, table.vpp, forward, backward)


def balanced_step_ms(table: KernelTable, num_microbatches: int) -> float:
    """Milliseconds of one pipeline over all layers, cut by the exact min-max, with the best number of chunks."""
    encoder = table.encoder[table.tp]
    forward = [encoder.forward.latency] * table.encoder_layers + [table.llm.forward.latency] * table.llm_layers
    backward = [encoder.backward.latency] * table.encoder_layers + [table.llm.backward.latency] * table.llm_layers
    steps = []
    for vpp in (v for v in range(1, table.vpp + 1) if table.vpp % v == 0):
        cuts = min_max_partition([f + b for f, b in zip(forward, backward, strict=True)], table.pp * vpp)
        assert cuts is not None, "there are more layers than stages"
        parts = list(pairwise(cuts))
        steps.append(
            _pipeline_step(
                table,
                num_microbatches,
                vpp,
                [sum(forward[lo:hi]) for lo, hi in parts],
                [sum(backward[lo:hi]) for lo, hi in parts],
            )
        )
    return min(steps)


def _pipeline_step(
    table: KernelTable, num_microbatches: int, vpp: int, forward: Sequence[float], backward: Sequence[float]
) -> float:
    pipeline = InterleavedPipeline(table.pp, vpp, num_microbatches, tuple(forward), tuple(backward), table.transfer)
    return table.gather + simulate_interleaved(pipeline).end + table.scatter


def _layer(raw: dict[str, list[tuple[str, float]]]) -> LayerKernels:
    return LayerKernels(
        *(KernelSequence.of([ms for _, ms in raw[way]], [kind == "compute" for kind, _ in raw[way]]) for way in _WAYS)
    )


_WAYS = ("forward", "backward")


def _back_to_back(kernels: KernelSequence) -> FloatArray:
    """(n, 2) start and end of kernels that follow each other without a gap."""
    ends = np.cumsum(kernels.durations)
    return np.stack([ends - kernels.durations, ends], axis=1)
