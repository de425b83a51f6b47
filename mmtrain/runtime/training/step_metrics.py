"""Reduce what the ranks measured in a step to the metrics of the whole job."""

import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.balance import BatchMeta
from mmtrain.balance.dispatch.phase_loads import off_node_volumes, phase_loads
from mmtrain.costs import (
    CostModel,
    CostTable,
    TokenLoad,
    costs_for,
    input_grad_needed,
    machine_for,
    model_flops,
    num_trained_parameters,
)
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.costs.recorded_costs import RecordedRatios, costs_of_table, recorded_table
from mmtrain.data import GroupStream
from mmtrain.data.index.sample_sources import SampleSources
from mmtrain.data.loading.batch_builder import stream_position
from mmtrain.models.shapes.model_shape import ModelShape, with_expert_spread
from mmtrain.program import LLM, ModelTiming, Stage, StepLoads
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.report import StepMetrics, TimeSplit
from mmtrain.report.metrics_record import DispatchMetrics, EdgeMetrics, ExpertMetrics, SourceMetrics
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.resilience.out_of_memory import peak_memory_bytes, peak_reserved_bytes
from mmtrain.runtime.resilience.stragglers import Straggler, StragglerDetector
from mmtrain.runtime.training.cost_drift import DRIFT_STEPS, CostDrift, CostDriftDetector
from mmtrain.runtime.training.expert_reduction import ExpertLoadReducer, ratios_at_spread
from mmtrain.runtime.world import World


@dataclass(frozen=True)
class RankFlags:
    """What one rank reports at the end of a step so that all ranks decide alike in the same step."""

    stop_requested: bool  # a signal asked this rank to stop
    is_saving: bool  # this rank is still writing a checkpoint
    lost_folder: bool = False  # another run has taken the run's folder; only the first rank knows
    is_copying: bool = False  # this rank's state is still on its way to host memory, or to the memory of its peer


@dataclass(frozen=True)
class StepMetricsReduction:
    """What all ranks measured in a step; equal on all ranks."""

    loss: float  # of all units with a loss
    drawing_loss: float | None  # of the generator, without its weight
    source_losses: tuple[float, ...]  # the parts of `loss` that come from each source
    time_s: TimeSplit  # mean over the ranks
    dispatch_s: float  # of `time_s.communication`, in dispatches; they wait for the slowest rank
    peak_memory_bytes: int  # of the rank that needed most
    num_broken_samples: int  # found undecodable in this step; a sample counts on each rank that needs it
    stop_requested: bool  # a signal asked at least one rank to stop
    no_rank_saves: bool  # every rank has written its part of the checkpoint
    no_rank_copies: bool  # the last copies in host memory are complete on every rank
    lost_folder: bool  # another run has taken the run's folder
    peak_reserved_bytes: int | None  # by the allocator of the GPU that needed most
    edges: dict[str, EdgeMetrics]
    stragglers: list[Straggler]
    new_stragglers: list[Straggler]  # those that were none in the step before
    experts: ExpertMetrics | None  # how tokens fell on the experts of mixtures
    cost_drift: CostDrift | None  # in the step in which it has lasted long enough


class StepMetricsReducer:
    """Exchanges the measurements of all ranks, once a step, and makes `StepMetrics` of them."""

    def __init__(
        self,
        rank_context: RankContext,
        stream: GroupStream,
        hardware: str,
        skipped: Sequence[int] = (),
        recorded_costs: CostTable | None = None,
        sources: SampleSources | None = None,
    ) -> None:
        """Reduce steps of `stream` without its positions in `skipped`.

        hardware: the plan's preset. recorded_costs: what the run recorded before it was resumed, in the place of the
            recipe's costs. sources: of the samples, if metrics are wanted for each.
        """
        self.sources = sources
        self._context, self._stream, self._skipped = rank_context, stream, skipped
        self._machine = machine_for(rank_context.recipe, hardware)
        self._shape = rank_context.shape
        self.costs: CostModel = costs_for(self._machine, rank_context.precision, rank_context.recipe.cluster.costs)
        watches_costs = rank_context.recipe.train.replan != "off"
        self._drift_detector = CostDriftDetector(rank_context.graph, rank_context.world.rank) if watches_costs else None
        if recorded_costs is not None:
            self.use_costs(recorded_costs)
        self._expert_loads = ExpertLoadReducer(rank_context)
        self._expert_spreads: deque[float] = deque(maxlen=DRIFT_STEPS)
        self._input_grad_needed = input_grad_needed(rank_context.shape)
        self._straggler_detector = StragglerDetector(rank_context.graph, self._work_of)
        self.peak_flops = self._machine.peak_flops(rank_context.precision) * rank_context.world.size

    def use_costs(self, table: CostTable) -> None:
        """Predict steps with the costs of a table from now on."""
        self.costs = costs_of_table(table, self._machine, self._context.precision)
        if table.expert_spread is not None:
            self._shape = with_expert_spread(self._shape, table.expert_spread)
        if self._drift_detector is not None:
            self._drift_detector.restart()

    def recorded_ratios(self) -> RecordedRatios | None:
        """Return what the last steps took beside what was predicted, equal on all ranks; None where it is not known."""
        return None if self._drift_detector is None else self._drift_detector.ratios()

    def corrected_table(self, ratios: RecordedRatios, loads: StepLoads, run: str) -> CostTable:
        """Return the costs that steps are predicted with, corrected by what the run `run` recorded.

        loads: of a step; they tell how much of a ratio comes from unequal loads of experts.
        """
        spread = statistics.median(self._expert_spreads) if self._expert_spreads else None
        if spread is not None:
            ratios = ratios_at_spread(ratios, self.timing(loads), spread)
        precision = self._context.precision
        return recorded_table(self.costs, self._machine, precision, self._shape, ratios, run, spread)

    def timing(self, loads: StepLoads) -> ModelTiming:
        """Return what a step with these loads should take, by the cost model of the plan's hardware."""
        return ModelTiming(
            self._context.graph,
            self._shape,
            self.costs,
            loads,
            self._input_grad_needed,
            num_trained_parameters,
            ELEMENT_BYTES[self._context.precision],
            self._machine.ranks_per_node,
            self._machine.overlap_slowdown,
            self._machine.rail_hop_s,
            grad_reduce=self._context.recipe.train.grad_reduce,
            orthogonalizes=self._context.recipe.train.optimizer.kind == "muon",
        )

    def _work_of(self, stage: Stage) -> Hashable:
        """Return a value that is equal for stages of the same kinds of layers, whose pace can be compared."""
        layers = self._context.shape.unit(stage.id.unit).layers
        return stage.id.unit, frozenset((layers[i], i in stage.recompute) for i in range(*stage.layers))

    def reduce(
        self, outcome: StepOutcome, data_wait_s: float, num_broken_samples: int, flags: RankFlags
    ) -> StepMetricsReduction:
        """Exchange the measurements of all ranks with one all-gather; every rank must call this once a step."""
        world, record = self._context.world, outcome.record
        assert outcome.loads is not None, "an outcome of a step that was run"
        seconds = record.seconds_by_kind()
        times = [seconds["compute"], seconds["wait"], seconds["communication"], data_wait_s, record.dispatch_s()]
        traffic = record.traffic_by_edge()
        edges = [value for e in self._context.graph.edges for value in (traffic[e].nbytes, traffic[e].wait_s)]
        timing = self.timing(outcome.loads)
        slowdowns = self._straggler_detector.rank_values(world.rank, record, timing)
        drift = self._drift_detector.rank_values(record, timing) if self._drift_detector is not None else []
        scalars = [
            outcome.loss,
            float(peak_memory_bytes(world.device)),
            float(num_broken_samples),
            float(flags.stop_requested),
            float(not flags.is_saving),
            float(flags.lost_folder),
            float(not flags.is_copying),
            float(peak_reserved_bytes(world.device) or 0),
            outcome.unit_losses.get(GENERATOR, 0.0),
        ]
        num_sources = 0 if self.sources is None else len(self.sources.names)
        source_losses = list(outcome.source_losses) or [0.0] * num_sources  # ranks without the LLM's head have none
        parts = [scalars, source_losses, times, edges, slowdowns, drift]
        table = gather_measurements(world, [value for part in parts for value in part])
        ends = list(accumulate(map(len, parts)))[:-1]
        all_scalars, all_source_losses, all_times, all_edges, all_slowdowns, all_drift = table.tensor_split(ends, dim=1)
        losses, peaks, broken, stop_flags, saved_flags, lost_flags, copied_flags, reserved, drawing = (
            all_scalars.unbind(dim=1)
        )
        generator = self._context.recipe.model.generator
        experts = self._expert_loads.reduce()
        if experts is not None:
            self._expert_spreads.append(experts.spread)
        stragglers, new_stragglers = self._straggler_detector.detect(
            all_slowdowns.numpy(), record.end_s - record.start_s
        )
        return StepMetricsReduction(
            loss=float(losses.sum()),
            drawing_loss=None if generator is None else float(drawing.sum()) / generator.loss_weight,
            source_losses=tuple(all_source_losses.sum(dim=0).tolist()),
            time_s=TimeSplit(*all_times[:, :-1].mean(dim=0).tolist()),
            dispatch_s=float(all_times[:, -1].mean()),
            peak_memory_bytes=int(peaks.max()),
            num_broken_samples=int(broken.sum()),
            stop_requested=bool(stop_flags.any()),
            no_rank_saves=bool(saved_flags.all()),
            no_rank_copies=bool(copied_flags.all()),
            lost_folder=bool(lost_flags.any()),
            peak_reserved_bytes=int(reserved.max()) or None,
            edges=self._edge_metrics(all_edges.sum(dim=0).tolist()),
            experts=experts,
            stragglers=stragglers,
            new_stragglers=new_stragglers,
            cost_drift=self._drift_detector.observe(all_drift.numpy()) if self._drift_detector is not None else None,
        )

    def _edge_metrics(self, values: list[float]) -> dict[str, EdgeMetrics]:
        """Return bytes and waits of the edges over which anything went; `values` holds two numbers per edge."""
        by_edge = zip(self._context.graph.edges, values[::2], values[1::2], strict=True)
        return {str(edge): EdgeMetrics(int(nbytes), wait_s) for edge, nbytes, wait_s in by_edge if nbytes}

    def metrics(
        self, meta: BatchMeta, outcome: StepOutcome, reduction: StepMetricsReduction, lr: float, step_time_s: float
    ) -> StepMetrics:
        """Describe a finished step."""
        flops = counted_flops(self._context.shape, meta)
        num_groups = self._context.recipe.train.num_groups
        return StepMetrics(
            step=meta.step + 1,
            loss=reduction.loss,
            drawing_loss=reduction.drawing_loss,
            grad_norm=outcome.grad_norm or 0.0,
            lr=lr,
            step_time_s=step_time_s,
            samples=len(meta.sample_id),
            tokens=int(meta.sample_tokens.sum()),
            padding=None if meta.padding is None else int(meta.padding.sum()),
            epoch=self._stream.epochs_done((stream_position(meta.step, self._skipped) + 1) * num_groups),
            mfu=flops / step_time_s / self.peak_flops,
            peak_flops=self.peak_flops,
            time_s=reduction.time_s,
            peak_memory_bytes=reduction.peak_memory_bytes,
            peak_reserved_bytes=reduction.peak_reserved_bytes,
            edges=reduction.edges,
            slow_ranks=tuple(straggler.to_text() for straggler in reduction.stragglers),
            ranks=self._context.world.size,
            dispatch=self._dispatch_metrics(meta, reduction),
            experts=reduction.experts,
            sources={} if self.sources is None else source_metrics(meta, self.sources, reduction.source_losses),
        )

    def _dispatch_metrics(self, meta: BatchMeta, reduction: StepMetricsReduction) -> DispatchMetrics | None:
        """Describe what sharded units gained by balancing a step of the stream; None in other placements."""
        graph, ranks_per_node = self._context.graph, self._machine.ranks_per_node
        mesh = graph.mesh(LLM)
        if mesh.dispatch is None or meta.stream_group is None:
            return None
        loads = phase_loads(meta, mesh.dp, self._context.num_microbatches, mesh.cp)
        off_node = {}
        if graph.dispatches_items and mesh.exchange == "all_to_all" and graph.world_size > ranks_per_node:
            element_bytes = ELEMENT_BYTES[self._context.precision]
            row_bytes = {unit: width * element_bytes for unit, width in self._context.shape.feature_widths.items()}
            off_node = off_node_volumes(meta, ranks_per_node, row_bytes, mesh.tp)
        return DispatchMetrics(reduction.dispatch_s, loads, off_node)


def gather_measurements(world: World, values: list[float]) -> Tensor:
    """Return the values of all ranks, (ranks, values) in float64 on the host; one rank alone asks no device."""
    if world.size == 1:
        return torch.tensor([values], dtype=torch.float64)
    row = torch.tensor(values, dtype=torch.float64, device=world.device)
    rows = [torch.empty_like(row) for _ in range(world.size)]
    dist.all_gather(rows, row)
    return torch.stack(rows).cpu()


def source_metrics(meta: BatchMeta, sources: SampleSources, losses: Sequence[float]) -> dict[str, SourceMetrics]:
    """Describe what a step trained on of each source, by name.

    losses: the parts of the step's mean loss that come from each source.
    """
    numbers, num_sources = sources.numbers[meta.sample_id], len(sources.names)
    samples = np.bincount(numbers, minlength=num_sources).tolist()
    tokens = np.bincount(numbers, weights=meta.sample_tokens, minlength=num_sources).tolist()
    targets = np.bincount(numbers, weights=meta.targets, minlength=num_sources).tolist()
    return {
        name: SourceMetrics(
            samples=samples[i],
            tokens=int(tokens[i]),
            loss=losses[i] * meta.total_targets / targets[i] if targets[i] else None,
        )
        for i, name in enumerate(sources.names)
    }


def counted_flops(shape: ModelShape, meta: BatchMeta) -> int:
    """Return the FLOPs of a step that MFU counts.

    Unpadded tokens, no recomputation, only the gradients that train, and the head only for tokens with a target.
    """
    loads = {unit: TokenLoad.of(table.tokens) for unit, table in meta.items.items()}
    loads[LLM] = replace(TokenLoad.of(meta.sample_tokens), targets=meta.total_targets)
    return model_flops(shape, loads)
