"""What a step reports: every rank's seconds, loss and memory, gathered into the metrics of the whole job."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmtrain.balance import BatchMeta
from mmtrain.costs import TokenLoad, costs_for, input_grad_needed, model_flops, num_parameters, preset
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.data import GroupStream
from mmtrain.program import ModelTiming, Stage, StepLoads
from mmtrain.report import StepMetrics, TimeSplit
from mmtrain.report.metrics_record import EdgeMetrics
from mmtrain.runtime.execution.executor import StepOutcome
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.resilience.out_of_memory import peak_memory_bytes
from mmtrain.runtime.resilience.stragglers import Straggler, StragglerDetector


@dataclass(frozen=True)
class StepMetricsReduction:
    """A step over all ranks."""

    loss: float  # mean over the global batch's target tokens
    time_s: TimeSplit  # mean over the ranks
    peak_memory_bytes: int  # of the rank that needed most
    broken_samples: int  # found undecodable in this step
    stopped: bool  # a signal has asked at least one rank to stop
    saved: bool  # no rank is still writing a checkpoint
    edges: dict[str, EdgeMetrics]
    slow: list[Straggler]
    newly_slow: list[Straggler]  # those of them who were not before


class StepMetricsReducer:
    """Turns what each rank saw into `StepMetrics`."""

    def __init__(self, job: RankContext, stream: GroupStream, hardware: str) -> None:
        self._job, self._stream = job, stream
        precision = job.precision
        self._machine = preset(hardware)
        self._costs, self._input_grad = (
            costs_for(self._machine, precision, job.recipe.cluster.costs),
            input_grad_needed(job.shape),
        )
        self._slow = StragglerDetector(job.graph, self._work_of)
        self.peak_flops = self._machine.peak_flops(precision) * job.world.size

    def timing(self, loads: StepLoads) -> ModelTiming:
        """What a step with these loads should take, by the cost model of the plan's hardware."""
        job = self._job
        element_bytes = ELEMENT_BYTES[job.precision]
        rules = (self._input_grad, num_parameters, element_bytes, self._machine.ranks_per_node)
        return ModelTiming(job.graph, job.shape, self._costs, loads, *rules)

    def _work_of(self, stage: Stage) -> Hashable:
        """What a stage does, whatever the number of its layers: stages of which this is equal take comparable time."""
        layers = self._job.shape.unit(stage.id.unit).layers
        return stage.id.unit, frozenset((layers[at], at in stage.recompute) for at in range(*stage.layers))

    def reduce(
        self, outcome: StepOutcome, data_wait_s: float, broken_samples: int, stop: bool, saved: bool
    ) -> StepMetricsReduction:
        """Bring all ranks' figures together; every rank must call this once a step."""
        world, record, seconds = self._job.world, outcome.record, outcome.record.seconds()
        assert outcome.loads is not None, "an outcome of a step that was run"
        times = [seconds["compute"], seconds["wait"], seconds["communication"], data_wait_s]
        flags = [float(stop), float(saved)]
        traffic = record.traffic_by_edge()
        edges = [figure for e in self._job.graph.edges for figure in (traffic[e].nbytes, traffic[e].wait_s)]
        pace = self._slow.rank_figures(world.rank, record, self.timing(outcome.loads))
        mine = [
            outcome.loss,
            float(peak_memory_bytes(world.device)),
            float(broken_samples),
            *flags,
            *times,
            *edges,
            *pace,
        ]
        rows = [torch.tensor(mine, dtype=torch.float64, device=world.device)]
        if world.size > 1:
            row = rows[0]
            rows = [torch.empty_like(row) for _ in range(world.size)]
            dist.all_gather(rows, row)
        table = torch.stack(rows).cpu()
        cuts = [5, 5 + len(times), 5 + len(times) + len(edges)]
        _, all_times, all_edges, all_paces = table.tensor_split(cuts, dim=1)
        slow, newly_slow = self._slow.detect(all_paces.numpy(), record.end_s - record.start_s)
        return StepMetricsReduction(
            float(table[:, 0].sum()),
            TimeSplit(*all_times.mean(dim=0).tolist()),
            int(table[:, 1].max()),
            int(table[:, 2].sum()),
            bool(table[:, 3].any()),
            bool(table[:, 4].all()),
            self._by_edge(all_edges.sum(dim=0).tolist()),
            slow,
            newly_slow,
        )

    def _by_edge(self, figures: list[float]) -> dict[str, EdgeMetrics]:
        """The edges over which anything went."""
        found = zip(self._job.graph.edges, figures[::2], figures[1::2], strict=True)
        return {str(edge): EdgeMetrics(int(nbytes), wait_s) for edge, nbytes, wait_s in found if nbytes}

    def metrics(
        self,
        meta: BatchMeta,
        outcome: StepOutcome,
        seen: StepMetricsReduction,
        lr: float,
        took_s: float,
        val_loss: float | None,
    ) -> StepMetrics:
        """Describe a finished step; MFU counts unpadded tokens, no recompute and only the gradients that train."""
        loads = {unit: TokenLoad.of(table.tokens) for unit, table in meta.items.items()}
        loads["llm"] = TokenLoad.of(meta.tokens)
        flops = model_flops(self._job.shape, loads)
        num_groups = self._job.recipe.train.global_batch
        return StepMetrics(
            step=meta.step + 1,
            loss=seen.loss,
            grad_norm=outcome.grad_norm or 0.0,
            lr=lr,
            step_time_s=took_s,
            samples=len(meta.sample_id),
            tokens=int(meta.tokens.sum()),
            epoch=self._stream.epochs_done((meta.step + 1) * num_groups),
            mfu=flops / took_s / self.peak_flops,
            peak_flops=self.peak_flops,
            time_s=seen.time_s,
            peak_memory_bytes=seen.peak_memory_bytes,
            val_loss=val_loss,
            edges=seen.edges,
            slow_ranks=tuple(slow.to_text() for slow in seen.slow),
        )
