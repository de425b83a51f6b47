"""ZeRO-1 AdamW over Megatron-core's gradient buffers, for one unit on one rank.

Megatron's `DistributedDataParallel` keeps parameters and gradients in flat buffers, and `DistributedOptimizer` shards
the update over data-parallel replicas. Four of their defaults are turned off because the program decides: buckets are
those of the program, no hook starts a reduction, a step does not gather parameters, and nothing is averaged (the loss
is already normalized).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from mmtrain.models.megatron.compat import no_cuda_graphs, optimizer_scope, param_layout
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.optim.bf16_moments import Bf16MomentsAdamW
from mmtrain.models.optim.bf16_reduction import RoundedReduction
from mmtrain.models.optim.clip_factors import ClipFactors, set_clip_factors, sum_of_squares
from mmtrain.models.optim.held_state import HeldTensor
from mmtrain.models.optim.matrix_exchange import DividedWeight
from mmtrain.models.optim.muon import MOMENTUM, AdamWBesideMuon, Muon, MuonWeight
from mmtrain.models.optim.parameter_specs import MOMENTS, NamedShard, UnitRates, WeightSource
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.recipe.settings.train_settings import OptimizerSettings

BucketNumber = tuple[int, int]  # model chunk, and bucket in it


@dataclasses.dataclass(frozen=True)
class LocalParam:
    """A parameter of which this rank holds a shard."""

    spec: ParamSpec
    tied: bool = False  # another stage of the same replica holds a copy of this weight
    owned: bool = True  # False for the copy of a tied weight that is neither saved nor counted in norms


class ZeroAdamW:
    """AdamW for the stages of one unit; each data-parallel replica updates its shard of the flat buffers.

    With `rates.matrices` Muon takes its place for the weights of linears.

    Every bucket has buffers of its own, so that the gradients of each can be reduced as soon as they are complete.

    Args:
        buckets: the unit's parameters on this rank, those together whose gradients are reduced together.
        params: every parameter of the stages, with its plan-independent name and how tensor parallelism splits it.
        groups: the unit's process groups.
        device: where the parameters are.
        settings: of all units.
        rates: this unit's own.
        rounds_reduced: whether replicas send each other gradients in bf16.
    """

    def __init__(
        self,
        buckets: Mapping[BucketNumber, Sequence[nn.Parameter]],
        params: Mapping[nn.Parameter, LocalParam],
        groups: ParallelGroups,
        device: torch.device,
        settings: OptimizerSettings,
        rates: UnitRates,
        rounds_reduced: bool = False,
    ) -> None:
        self._params = params
        self._groups = groups
        self._device = device
        self._rounds_reduced = rounds_reduced
        self._reductions: dict[Any, RoundedReduction] = {}  # under way, by Megatron's bucket
        self._gathers: dict[BucketNumber, list[dist.Work]] = {}  # under way
        self._muon: Muon | None = None
        self._trained_by_muon = {p for p in params if p.requires_grad and params[p].spec.name in rates.matrices}
        self._frozen = [p for p in params if not p.requires_grad]
        self._trained = [p for p in params if p.requires_grad]
        # A bucket of the program may have none, where all that would train in its layers is frozen by name.
        self._buffers: dict[BucketNumber, DistributedDataParallel] = {}
        if self._trained:
            with optimizer_scope(device):
                self._buffers = {
                    number: _buffers(of_bucket, groups)
                    for number, of_bucket in buckets.items()
                    if any(p.requires_grad for p in of_bucket)
                }
                # With autograd the fp32 shards would be views with a history, and reading their `.grad` would warn.
                with torch.no_grad():
                    names = {p: params[p].spec.name for p in self._trained}
                    self._optimizer = _optimizer(list(self._buffers.values()), rates.groups(names), groups, settings)
            self._shards = {p: self._shard_of(p) for p in self._trained if p in self._optimizer.model_param_gbuf_map}
            self._start_moments(torch.bfloat16 if settings.moments == "bf16" else torch.float32)
            self._muon = self._build_muon(rates, settings.muon_momentum)

    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""
        if self._trained:
            for buffers in self._buffers.values():
                buffers.zero_grad_buffer()
            self._optimizer.zero_grad()

    def tied_gradient(self) -> Tensor | None:
        """Return the gradient of this rank's copy of the tied embedding matrix; None if it has no copy."""
        tied = [p for p in self._trained if self._params[p].tied]
        return tied[0].main_grad if tied else None  # type: ignore[attr-defined]

    def reduce_grads(self, chunk: int, bucket: int) -> None:
        """Start to sum the gradients of a bucket over the replicas; `finish_reduction` waits for the result.

        The reduction overlaps with what this rank still computes.
        """
        buffers = self._buffers.get((chunk, bucket))
        if self._groups.dp_size == 1 or buffers is None:
            return
        if not self._rounds_reduced:
            buffers.start_grad_sync()
            return
        for group in _bucket_groups(buffers):
            for flat in group.buckets:
                self._reductions[flat] = RoundedReduction(flat.grad_data, self._groups.dp)

    def _reduce_sequence_parallel_grads(self) -> None:
        """Sum over the TP group the gradients of weights that saw only a shard of the tokens on each rank.

        The group's ranks hold the same shards of them, so each sums what it needs, once for all buckets.
        """
        partial = [p.main_grad for p in self._trained if getattr(p, "sequence_parallel", False)]  # type: ignore[attr-defined]
        if not partial:
            return
        total = torch.cat([gradient.flatten() for gradient in partial])
        dist.all_reduce(total, group=self._groups.tp)
        sizes = [gradient.numel() for gradient in partial]
        for gradient, reduced in zip(partial, torch.split(total, sizes), strict=True):
            gradient.copy_(reduced.view_as(gradient))

    def finish_reduction(self) -> None:
        """Wait until the gradients are summed."""
        if self._trained and self._groups.dp_size > 1 and not self._rounds_reduced:
            for buffers in self._buffers.values():
                buffers.finish_grad_sync()
        for flat, reduction in self._reductions.items():
            flat.grad_data.view(self._groups.dp_size, -1)[self._groups.dp_rank].copy_(reduction.sum())
        self._reductions.clear()
        self._reduce_sequence_parallel_grads()

    def grad_sq_sum(self) -> Tensor:
        """Return the sum of squares (float64) of the gradient elements that are counted on this rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._trained:
            with optimizer_scope(self._device):
                self._optimizer.prepare_grads()  # the shard's gradients, in fp32, become `.grad` of the shards
            for param, shard in self._shards.items():
                if self._is_counted_here(param) and shard.grad is not None:
                    total += sum_of_squares(shard.grad)
        return total

    def step(self, lr: float, clip: ClipFactors) -> None:
        """Divide the gradients by `clip.divisor` and update this rank's shard of the parameters, if at all."""
        if not self._trained:
            return
        adam = self._optimizer.optimizer
        set_clip_factors(adam, clip)
        for group in adam.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if self._muon is not None:
            self._muon.step(lr, clip)
        with optimizer_scope(self._device):
            self._optimizer.step_with_ready_grads()

    def count_update(self) -> None:
        """Count the update of the last step; the fused kernel counts on the device."""
        if self._trained and isinstance(self._optimizer.optimizer, Bf16MomentsAdamW):
            self._optimizer.optimizer.num_updates += 1

    def start_gather(self, chunk: int, bucket: int) -> None:
        """Start to gather a bucket's parameters from the shards of all replicas; `finish_gather` waits for them."""
        if self._groups.dp_size > 1:
            groups = _bucket_groups(self._buffers.get((chunk, bucket)))
            self._gathers[chunk, bucket] = [work for group in groups for work in _gather_params(group)]

    def finish_gather(self, chunk: int, bucket: int) -> None:
        """Wait until a bucket's parameters are gathered."""
        for work in self._gathers.pop((chunk, bucket), ()):
            work.wait()

    def gather_params(self) -> None:
        """Gather the updated parameters of all buckets from the shards of all replicas."""
        for chunk, bucket in self._buffers:
            self.start_gather(chunk, bucket)
        for chunk, bucket in self._buffers:
            self.finish_gather(chunk, bucket)

    def set_num_updates(self, value: int) -> None:
        """Continue after `value` updates; Adam's bias correction depends on this count."""
        if not self._trained:
            return
        if isinstance(self._optimizer.optimizer, Bf16MomentsAdamW):
            self._optimizer.optimizer.num_updates = value
        for param, shard in self._shards.items():
            # One tensor for each shard: a shared tensor would count every parameter's update.
            if param not in self._trained_by_muon:
                self._optimizer.optimizer.state[shard]["step"] = torch.tensor(float(value), device=shard.device)

    def gradients(self) -> Iterator[NamedShard]:
        """Yield this rank's shards of the reduced gradients (before clipping), named like the parameters."""
        for param, shard in self._shards.items() if self._trained else ():
            if self._is_counted_here(param):
                assert shard.grad is not None
                yield self._named(param, "", shard.grad, self._flat_range(param))

    def shards(self) -> Iterator[NamedShard]:
        """Yield master weights and moments; each element is on exactly one rank.

        A moment has the name of its parameter with `#exp_avg` and `#exp_avg_sq` appended, or Muon's `#momentum`.
        """
        if self._groups.dp_rank == 0:
            for param in self._frozen:
                if self._is_counted_here(param):
                    yield self._named(param, "", param.detach(), None)
        for param, shard in self._shards.items() if self._trained else ():
            if self._is_counted_here(param):
                yield from self._named_shards(param, shard)

    def held(self) -> Iterator[HeldTensor]:
        """Yield everything that this rank holds from one update to the next one, replicas and counters too."""
        for param in self._frozen:
            yield HeldTensor(self._params[param].spec.name, param.detach(), "never", self._holders(param, whole=True))
        for param in self._trained if self._groups.dp_size > 1 else ():
            name = f"{self._params[param].spec.name}#gathered"
            yield HeldTensor(name, param.detach(), "by gather", self._holders(param, whole=True))
        for param, shard in self._shards.items() if self._trained else ():
            holders = self._holders(param, whole=False)
            for named in self._named_shards(param, shard):
                yield HeldTensor(named.name, named.tensor, "by update", holders)
            if param.dtype != shard.dtype:
                first, last = self._flat_range(param)
                rounded = param.detach().view(-1)[first:last]
                yield HeldTensor(f"{self._params[param].spec.name}#rounded", rounded, "by update", holders)
            if "step" in (state := self._optimizer.optimizer.state[shard]):
                yield HeldTensor(f"{self._params[param].spec.name}#step", state["step"], "by update")

    def _holders(self, param: nn.Parameter, whole: bool) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups whose ranks hold the same of a parameter; `whole`: all of it, and not a shard."""
        groups = [self._groups.dp] if whole and self._groups.dp_size > 1 else []
        if self._params[param].spec.dim is None and self._groups.tp_size > 1:
            groups.append(self._groups.tp)
        return tuple(groups)

    def load(self, read: Callable[[NamedShard], Tensor]) -> None:
        """Fill parameters and moments; `read` returns the saved elements of a shard as a flat tensor."""
        with torch.no_grad():
            for param in self._frozen:
                param.copy_(read(self._named(param, "", param, None)).view_as(param))
            for param, shard in self._shards.items() if self._trained else ():
                for named in self._named_shards(param, shard):
                    named.tensor.copy_(read(named).view_as(named.tensor))
            if self._trained:
                self._optimizer._copy_main_params_to_model_params()
        self.gather_params()

    def start_masters(self, weights: WeightSource) -> None:
        """Start master weights from what `weights` has at a higher precision than that of the parameters."""
        for param, shard in self._shards.items() if self._trained else ():
            if param.dtype != torch.float32:
                spec, first = self._params[param].spec, self._flat_range(param)[0]
                weights.fill_master(
                    shard.detach(), spec, self._groups.tp_rank, self._groups.tp_size, first, param.dtype
                )

    def _named_shards(self, param: nn.Parameter, shard: Tensor) -> Iterator[NamedShard]:
        """Yield the master weight and the moments of a trained parameter."""
        flat = self._flat_range(param)
        state = self._optimizer.optimizer.state[shard]
        yield self._named(param, "", shard.detach(), flat)
        for moment in self._moments_of(param):
            yield self._named(param, f"#{moment}", state[moment], flat)

    def _moments_of(self, param: nn.Parameter) -> tuple[str, ...]:
        return (MOMENTUM,) if param in self._trained_by_muon else MOMENTS

    def _named(self, param: nn.Parameter, suffix: str, tensor: Tensor, flat: tuple[int, int] | None) -> NamedShard:
        spec = self._params[param].spec
        return NamedShard(spec.name + suffix, spec, self._groups.tp_rank, self._groups.tp_size, flat, tensor)

    def _is_counted_here(self, param: nn.Parameter) -> bool:
        """Return whether this rank saves the parameter and counts it in norms; one rank does if several hold it."""
        local = self._params[param]
        return local.owned and (local.spec.dim is not None or self._groups.tp_rank == 0)

    def _shard_of(self, param: nn.Parameter) -> Tensor:
        group, order = self._optimizer.model_param_group_index_map[param]
        shard: Tensor = self._optimizer.optimizer.param_groups[group]["params"][order]
        return shard

    def _flat_range(self, param: nn.Parameter) -> tuple[int, int]:
        flat_range = self._optimizer._get_model_param_range_map(param)["param"]
        return flat_range.start, flat_range.end

    def _start_moments(self, dtype: torch.dtype) -> None:
        """Create the optimizer's state now, not in the first step, so that every checkpoint holds all of it."""
        for param, shard in self._shards.items():
            state = self._optimizer.optimizer.state[shard]
            if param not in self._trained_by_muon:
                state["step"] = torch.tensor(0.0, device=shard.device)
            for moment in self._moments_of(param):
                state[moment] = torch.zeros_like(shard, dtype=dtype)

    def _build_muon(self, rates: UnitRates, decay_rate: float) -> Muon | None:
        """Build what steps the weights of linears, if anything does; replicas tell each other what they hold of them.

        All replicas call this together.
        """
        params = [param for param in self._trained if param in self._trained_by_muon]
        if not params:
            return None
        own = [self._flat_range(p) if p in self._shards else (0, 0) for p in params]
        own_ranges = torch.tensor(own, device=self._device)
        ranges = own_ranges.new_empty(self._groups.dp_size, *own_ranges.shape)
        dist.all_gather_into_tensor(ranges.view(-1), own_ranges.view(-1), group=self._groups.dp)
        weights = []
        for param, of_replicas in zip(params, ranges.transpose(0, 1).tolist(), strict=True):
            spec, shard = self._params[param].spec, self._shards.get(param)
            momentum = None if shard is None else self._optimizer.optimizer.state[shard][MOMENTUM]
            divided = DividedWeight(spec, tuple((first, last) for first, last in of_replicas))
            scale = rates.lr_scale_of(spec.name)
            weight = MuonWeight(divided, rates.matrices[spec.name], shard, momentum, scale, rates.weight_decay)
            weights.append(weight)
        return Muon(weights, self._groups.dp, self._groups.tp, decay_rate, rates.matrix_dtype, self._device)


def _buffers(params: Sequence[nn.Parameter], groups: ParallelGroups) -> DistributedDataParallel:
    """Return the buffers of one bucket."""
    # Megatron reads only `calculate_per_token_loss` of this config: it turns off averaging over replicas.
    config = TransformerConfig(
        num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True, **no_cuda_graphs()
    )
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=False
    )
    holder = nn.ParameterList(params)
    layout = param_layout(holder, groups.dp_size, buffers)
    ddp = DistributedDataParallel(config, buffers, holder, pg_collection=groups.collection(), **layout)
    for group in _bucket_groups(ddp):
        # Set here, not in `buffers`: collectives must overlap with compute, but no hook may start or await them.
        group.ddp_config = dataclasses.replace(buffers, overlap_grad_reduce=True)
    return ddp


def _bucket_groups(ddp: DistributedDataParallel | None) -> tuple[Any, ...]:
    return () if ddp is None else (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)


def _gather_params(group: Any) -> Iterator[dist.Work]:
    """Start to gather the parameters of a group of Megatron's buckets from the shards of its ranks.

    Megatron's own `start_param_sync` does it in one coalesced operation. On gloo several of these under way write into
    memory that is freed (torch 2.13): a process ends without a word, or trains with what was written there.
    """
    replicas = group.intra_distributed_optimizer_instance_group
    for flat in group.buckets:
        shard = flat.param_data.view(replicas.size(), -1)[replicas.rank()]
        work = dist.all_gather_into_tensor(flat.param_data, shard, group=replicas, async_op=True)
        assert work is not None, "only a rank outside the group has none"
        yield work


def _optimizer(
    buckets: list[DistributedDataParallel],
    param_groups: list[dict[str, Any]],
    groups: ParallelGroups,
    settings: OptimizerSettings,
) -> DistributedOptimizer:
    is_bf16 = any(p.dtype == torch.bfloat16 for group in param_groups for p in group["params"])
    adam_class = Bf16MomentsAdamW if settings.moments == "bf16" else AdamWBesideMuon
    adam = adam_class(param_groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    config = OptimizerConfig(bf16=is_bf16, use_distributed_optimizer=True, lr=settings.lr)
    optimizer = DistributedOptimizer(
        adam,
        config,
        grad_scaler=None,
        init_state_fn=None,
        model_chunks=buckets,
        per_model_buffers={number: bucket.buffers for number, bucket in enumerate(buckets)},
        data_parallel_group=groups.dp,
        data_parallel_group_gloo=None,
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
    )
    # With `overlap_param_gather` the optimizer does not gather parameters: the program has an action `GatherParams`.
    optimizer.ddp_config = dataclasses.replace(optimizer.ddp_config, overlap_param_gather=True)
    return optimizer
