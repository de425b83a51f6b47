"""What a step reports: every rank's seconds, loss and memory, gathered into the metrics of the whole job."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mmtrain.balance import BatchMeta
from mmtrain.costs import Precision, TokenLoad, model_flops, preset
from mmtrain.data import GroupStream
from mmtrain.report import StepMetrics, TimeSplit
from mmtrain.runtime.executor import StepOutcome
from mmtrain.runtime.job import Job
from mmtrain.runtime.memory import peak_memory


@dataclass(frozen=True)
class Seen:
    """A step over all ranks."""

    loss: float  # mean over the global batch's target tokens
    time_s: TimeSplit  # mean over the ranks
    peak_memory_bytes: int  # of the rank that needed most
    broken_samples: int  # found undecodable in this step
    stopped: bool  # a signal has asked at least one rank to stop
    saved: bool  # no rank is still writing a checkpoint


class Meter:
    """Turns what each rank saw into `StepMetrics`."""

    def __init__(self, job: Job, stream: GroupStream, hardware: str) -> None:
        self._job, self._stream = job, stream
        precision: Precision = "bf16" if job.dtype == torch.bfloat16 else "fp32"
        self.peak_flops = preset(hardware).peak_flops(precision) * job.world.size

    def gather(self, outcome: StepOutcome, data_wait_s: float, broken_samples: int, stop: bool, saved: bool) -> Seen:
        """Bring all ranks' figures together; every rank must call this once a step."""
        world, seconds = self._job.world, outcome.record.seconds()
        times = [seconds["compute"], seconds["wait"], seconds["communication"], data_wait_s]
        flags = [float(stop), float(saved)]
        mine = [outcome.loss, float(peak_memory(world.device)), float(broken_samples), *flags, *times]
        rows = [torch.tensor(mine, dtype=torch.float64, device=world.device)]
        if world.size > 1:
            row = rows[0]
            rows = [torch.empty_like(row) for _ in range(world.size)]
            dist.all_gather(rows, row)
        table = torch.stack(rows).cpu()
        means = table[:, 5:].mean(dim=0).tolist()
        return Seen(
            float(table[:, 0].sum()),
            TimeSplit(*means),
            int(table[:, 1].max()),
            int(table[:, 2].sum()),
            bool(table[:, 3].any()),
            bool(table[:, 4].all()),
        )

    def metrics(
        self, meta: BatchMeta, outcome: StepOutcome, seen: Seen, lr: float, took_s: float, val_loss: float | None
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
        )
