"""Shard the stages of a unit over its replicas with torch's FSDP2 (`fully_shard`), and update the shards with AdamW.

Every layer is a group of parameters of its own: its weights are gathered before its forward and its backward, and its
gradients are reduced after the latter. A rank holds rows of dimension 0 of every parameter. With tensor parallelism
these are rows of what its place in the TP group holds, and the ranks at that place share them. Weights may stay
gathered from the first forward of a step to its last backward (ZeRO-2).

With expert parallelism a layer's experts are a group of their own, over the ranks that hold the same ones. It is
gathered and reduced with the rest of its layer.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmtrain.models.megatron.experts import Experts
from mmtrain.models.optim.bf16_moments import Bf16MomentsAdamW
from mmtrain.models.optim.bf16_reduction import RoundedReduceScatter
from mmtrain.models.optim.clip_factors import ClipFactors, set_clip_factors, sum_of_squares
from mmtrain.models.optim.held_state import HeldTensor
from mmtrain.models.optim.matrix_exchange import DividedWeight
from mmtrain.models.optim.muon import MOMENTUM, AdamWBesideMuon, Muon, MuonWeight
from mmtrain.models.optim.parameter_specs import (
    MOMENTS,
    NamedShard,
    UnitRates,
    WeightSource,
    initial_values,
    num_blocks,
)
from mmtrain.models.shapes.layer_shape import is_of_expert
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.llm_layers import Head
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe.settings.train_settings import OptimizerSettings

# Everything of a stage, and of a head, that computes with parameters, beside `forward`.
_STAGE_ENTRIES = ("run", "run_to_head", "predict", "run_losses")
_HEAD_ENTRIES = ("queries_and_loss", "logits", "greedy_tokens")


@dataclass(frozen=True)
class UnitSharding:
    """The meshes over which a unit is sharded. Without expert parallelism both are one object."""

    mesh: DeviceMesh  # of all replicas
    experts: DeviceMesh  # of the replicas that hold the same experts

    @property
    def holds_experts_apart(self) -> bool:
        """Whether experts are sharded over fewer replicas than other parameters."""
        return self.experts is not self.mesh

    def of(self, name: str) -> DeviceMesh:
        """Return the mesh over which the parameter of this name is sharded."""
        return self.experts if is_of_expert(name) else self.mesh


def shard_mesh(groups: Sequence[dist.ProcessGroup], ranks: Sequence[Sequence[int]], device: torch.device) -> DeviceMesh:
    """Return the mesh of replicas that hold the same parameters, of the ranks at one place in their TP groups.

    Args:
        groups: of the ranks that hold equal shards, and of those that hold one copy together; the latter alone if
            there is one copy.
        ranks: (copies, shards) global ranks.
        device: where parameters are.
    """
    if len(ranks) == 1:
        return DeviceMesh.from_group(groups[-1], device.type, mesh_dim_names=("shard",))
    return DeviceMesh.from_group(
        list(groups), device.type, mesh=torch.tensor(ranks), mesh_dim_names=("replicate", "shard")
    )


def shard_stage(
    stage: StageModule,
    sharding: UnitSharding,
    device: torch.device,
    compute_dtype: torch.dtype,
    keeps_weights: bool = False,
    rounds_reduced: bool = False,
) -> None:
    """Shard the parameters of a stage, layer by layer; trained ones are held in fp32 from now on.

    Args:
        stage: what is sharded.
        sharding: the meshes of its unit.
        device: where parameters are.
        compute_dtype: of gathered weights.
        keeps_weights: whether weights stay gathered after a forward; see `reduce_between_copies` and `release_weights`.
        rounds_reduced: whether ranks that hold a copy together send each other gradients in bf16.

    Whatever the parameters held is lost: their memory on `device` is that of one whole layer at a time, beside the
    shards. `initialize_shards` sets them.

    Losses are divided by the targets of the whole batch, so gradients are summed and never averaged.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    # Blocks return views; nothing changes their outputs in place, which is what FSDP warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh, policy = sharding.mesh, MixedPrecisionPolicy()
    if compute_dtype != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    grouped = stage.sharded_layers
    for layer in grouped:
        _move_empty(layer, device)
        for part in layer.modules():
            if getattr(part, "keeps_precision", False):  # a group of its own, which no rule of precision touches
                fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for experts in _experts_apart(layer, sharding):
            fully_shard(experts, mesh=sharding.experts, reshard_after_forward=not keeps_weights, mp_policy=policy)
        # Gathered again in the backward, unless it stays whole until `release_weights`, before an update.
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps_weights, mp_policy=policy)
    _move_empty(stage, device)
    fully_shard(stage, mesh=mesh, reshard_after_forward=not keeps_weights, mp_policy=policy)
    for entry in _STAGE_ENTRIES:
        if hasattr(stage, entry):  # only a generator predicts noise, only a guest returns losses of tokens
            register_fsdp_forward_method(stage, entry)
    for head in (layer for layer in grouped if isinstance(layer, Head)):
        for entry in _HEAD_ENTRIES:
            register_fsdp_forward_method(head, entry)
    for module in stage.modules():
        num_shards = _num_shards(sharding.experts if isinstance(module, Experts) else mesh)
        if isinstance(module, FSDPModule):
            _sum_gradients(module, rounds_reduced and num_shards > 1)
    _prefetch_neighbours([[layer, *_experts_apart(layer, sharding)] for layer in grouped])


def _experts_apart(layer: nn.Module, sharding: UnitSharding) -> list[Experts]:
    """Return the experts of a layer, where they are sharded by themselves."""
    return [part for part in layer.modules() if isinstance(part, Experts)] if sharding.holds_experts_apart else []


def _num_shards(mesh: DeviceMesh) -> int:
    """Return into how many shards a mesh divides one copy."""
    return mesh.size(mesh.ndim - 1)


def _sum_gradients(sharded: Any, rounds_reduced: bool) -> None:
    """Make FSDP sum the gradients of a sharded module, also those of parameters that got none."""
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    if rounds_reduced:
        sharded.set_custom_reduce_scatter(RoundedReduceScatter())
    # A rank whose microbatch does not reach a layer still takes part in the reduction of its gradients. The switch is
    # unknown to type checkers that see torch before 2.13.
    if hasattr(sharded, "set_reduce_scatter_unused_params"):
        sharded.set_reduce_scatter_unused_params(True)
    else:  # before torch 2.13
        _reduce_unused_params(sharded)


def _reduce_unused_params(sharded: Any) -> None:
    """Make FSDP reduce zeros for parameters that got no gradient, as `set_reduce_scatter_unused_params` does."""
    group = sharded._get_fsdp_state()._fsdp_param_group
    if group is None:  # all parameters of the module are in groups of its layers
        return
    reduce_gradients = group.post_backward

    def reduce_all_gradients(*unused: Any) -> None:
        for param in group.fsdp_params:
            if not hasattr(param, "_unsharded_param") or param.unsharded_accumulated_grad is not None:
                continue
            if param.unsharded_param.requires_grad and param.unsharded_param.grad is None:
                param.unsharded_param.grad = torch.zeros_like(param.unsharded_param)
        reduce_gradients(*unused)

    group.post_backward = reduce_all_gradients


def _move_empty(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module that are not sharded yet memory on `device`, without what they hold."""
    for param in module.parameters():
        if not isinstance(param, DTensor):
            dtype = torch.float32 if param.requires_grad else param.dtype
            param.data = torch.empty(param.shape, dtype=dtype, device=device)


def initialize_shards(
    stage: StageModule,
    specs: Mapping[str, ParamSpec],
    sharding: UnitSharding,
    tp_group: dist.ProcessGroup,
    seed: int,
    compute_dtype: torch.dtype,
    pretrained: WeightSource | None = None,
) -> None:
    """Set this rank's shards of a stage to what `initialize_parameters` sets whole parameters to.

    A rank draws, or reads, only what its shards need. `specs` says what each parameter was before it was sharded.
    """
    place = (tp_group.rank(), tp_group.size())
    with torch.no_grad():
        for name, param in stage.named_parameters():
            local, elements = _local(param).view(-1), flat_range(param, sharding.of(name))
            if pretrained is not None and pretrained.fill_range(local, specs[name], *place, elements[0]):
                continue
            # Rounded as weights that are not sharded are, so that both start alike.
            local.copy_(initial_values(specs[name], seed, num_blocks(stage), *place, elements).to(compute_dtype))


def _prefetch_neighbours(layers: Sequence[Sequence[Any]]) -> None:
    """Gather the next layer's weights while a layer computes; each is given by its groups of parameters.

    In the backward FSDP itself chooses the layer that ran before in the forward. That differs between a rank that has
    work and one that has none, and then they wait for each other forever.
    """
    for i, groups in enumerate(layers):
        for group in groups:
            group.set_modules_to_forward_prefetch(list(chain.from_iterable(layers[i + 1 : i + 2])))
            group.set_modules_to_backward_prefetch(list(layers[max(i - 1, 0)]))


def reduce_between_copies(stage: StageModule, is_last: bool, keeps_weights: bool = False) -> None:
    """Say whether the next backward is the step's last one, which alone sums gradients over the copies of a shard.

    keeps_weights: whether the backwards before it leave the weights gathered.
    """
    stage.set_requires_all_reduce(is_last)  # type: ignore[operator]
    if keeps_weights:
        stage.set_reshard_after_backward(is_last)  # type: ignore[operator]


def release_weights(stage: StageModule) -> None:
    """Free gathered weights, so that the next forward gathers what an update or a checkpoint has made of the shards.

    A step's last backward has freed those of layers that it reached. Others, as of a unit that a step did not train, or
    of a forward without backward, would be stale.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def weight_shards(
    params: Mapping[nn.Parameter, ParamSpec], sharding: UnitSharding, tp_group: dist.ProcessGroup
) -> Iterator[NamedShard]:
    """Yield this rank's shards of sharded parameters; `params` says what each was before."""
    for param, spec in params.items():
        local = _local(param)
        if local.numel():
            elements = flat_range(param, sharding.of(spec.name))
            yield NamedShard(spec.name, spec, tp_group.rank(), tp_group.size(), elements, local)


def flat_range(param: nn.Parameter, mesh: DeviceMesh) -> tuple[int, int]:
    """Return which elements of the flattened parameter this rank holds: rows, divided as `torch.chunk` does."""
    return shard_ranges(param, mesh)[mesh.get_local_rank(mesh.ndim - 1)]


def shard_ranges(param: nn.Parameter, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Return `flat_range` of every rank that holds a shard of the same copy."""
    num_rows = param.shape[0]
    row_size = param.numel() // num_rows
    num_shards = _num_shards(mesh)
    rows_per_shard = -(-num_rows // num_shards)
    borders = [min(rank * rows_per_shard, num_rows) * row_size for rank in range(num_shards + 1)]
    return list(pairwise(borders))


class FullyShardedAdamW:
    """AdamW over this rank's shards of one unit's parameters on one mesh, in fp32; implements `UnitOptimizer`.

    With `rates.matrices` Muon takes its place for the weights of linears.

    FSDP reduces gradients and gathers parameters inside the passes, so the methods that other placements use for that
    do nothing. Gradients of which each rank of a TP group has a part are summed over the group before the step: sums
    over replicas and over the group may be taken in any order, and here a shard is summed, once a step.

    Args:
        params: sharded parameters of the unit, with what each was before.
        mesh: over which they are sharded. That of a parameter is no substitute: torch caches specs of tensors, and with
            them meshes whose groups are gone, over all groups that a process has had.
        tp_group: ranks that split the parameters before these were sharded.
        settings: of all units.
        rates: this unit's own.
        gathered: stages whose weights may be gathered when the shards change.
    """

    def __init__(
        self,
        params: Mapping[nn.Parameter, ParamSpec],
        mesh: DeviceMesh,
        tp_group: dist.ProcessGroup,
        settings: OptimizerSettings,
        rates: UnitRates,
        gathered: Sequence[StageModule] = (),
    ) -> None:
        self._gathered, self._rates = gathered, rates
        self._specs, self._device = params, next(iter(params)).device
        self._mesh, self._tp_group = mesh, tp_group
        # One copy of the unit is saved and counted in norms.
        self._is_first_copy = mesh.ndim == 1 or mesh.get_local_rank("replicate") == 0
        # Plain tensors that share the memory of the shards: torch's fused kernel takes no DTensor beside a scaler.
        self._masters = {
            param: nn.Parameter(_local(param)) for param in params if param.requires_grad and _local(param).numel()
        }
        self._adam: torch.optim.AdamW | None = None
        if self._masters:
            names = {master: params[param].name for param, master in self._masters.items()}
            adam_class = Bf16MomentsAdamW if settings.moments == "bf16" else AdamWBesideMuon
            rules = rates.groups(names)
            self._adam = adam_class(rules, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
            self._start_moments(torch.bfloat16 if settings.moments == "bf16" else torch.float32)
        self._muon = self._build_muon(settings.muon_momentum)

    def zero_grad(self) -> None:
        """Clear the gradients of the last step."""
        for param in self._specs:
            param.grad = None
        for master in self._masters.values():
            master.grad = None

    def tied_gradient(self) -> Tensor | None:
        """Return None: a rank holds both ends of the LLM, and one matrix for them."""
        return None

    def reduce_grads(self, chunk: int, bucket: int) -> None:
        """Do nothing: the backward reduces gradients."""

    def finish_reduction(self) -> None:
        """Do nothing: a backward ends when its gradients are reduced."""

    def grad_sq_sum(self) -> Tensor:
        """Return the sum of squares (float64) of the gradient elements that are counted on this rank."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for param, master in self._masters.items():
            # Nothing at all reached a parameter without a gradient; its weights decay all the same.
            master.grad = torch.zeros_like(master) if param.grad is None else _local(param.grad)
        self._sum_partial_gradients()
        for param, master in self._masters.items():
            if self._is_counted_here(param):
                assert master.grad is not None
                total += sum_of_squares(master.grad)
        return total

    def _sum_partial_gradients(self) -> None:
        """Sum gradients over the TP group of which each of its ranks has a part; all of it hold the same shards."""
        partial = [master.grad for param, master in self._masters.items() if self._specs[param].is_gradient_partial]
        gradients = [gradient for gradient in partial if gradient is not None]
        if not gradients:
            return
        total = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(total, group=self._tp_group)
        for gradient, summed in zip(gradients, torch.split(total, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def _is_counted_here(self, param: nn.Parameter) -> bool:
        """Return whether this rank saves its shard and counts it in norms; one rank does of those that hold it."""
        return self._is_first_copy and (self._specs[param].dim is not None or self._tp_group.rank() == 0)

    def step(self, lr: float, clip: ClipFactors) -> None:
        """Divide the gradients by `clip.divisor` and update this rank's shards of the parameters, if at all."""
        self._release_weights()
        if self._muon is not None:
            self._muon.step(lr, clip)
        if self._adam is None:
            return
        set_clip_factors(self._adam, clip)
        for group in self._adam.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self._adam.step()

    def count_update(self) -> None:
        """Count the update of the last step; the fused kernel counts on the device."""
        if isinstance(self._adam, Bf16MomentsAdamW):
            self._adam.num_updates += 1

    def start_gather(self, chunk: int, bucket: int) -> None:
        """Do nothing: passes gather parameters."""

    def finish_gather(self, chunk: int, bucket: int) -> None:
        """Do nothing: passes gather parameters."""

    def gather_params(self) -> None:
        """Do nothing: passes gather parameters."""

    def set_num_updates(self, value: int) -> None:
        """Continue after `value` updates; Adam's bias correction depends on this count."""
        if self._adam is None:
            return
        if isinstance(self._adam, Bf16MomentsAdamW):
            self._adam.num_updates = value
        for param, master in self._masters.items():
            if not self._is_trained_by_muon(param):
                self._adam.state[master]["step"] = torch.tensor(float(value), device=master.device)

    def gradients(self) -> Iterator[NamedShard]:
        """Yield this rank's shards of the reduced gradients, named like the parameters."""
        for param, master in self._masters.items():
            if self._is_counted_here(param):
                assert master.grad is not None
                yield self._named(param, "", master.grad)

    def shards(self) -> Iterator[NamedShard]:
        """Yield master weights and moments, named as by `ZeroAdamW`; each element is on exactly one rank."""
        for param in self._specs:
            if self._is_counted_here(param):
                yield from self._shards_of(param)

    def held(self) -> Iterator[HeldTensor]:
        """Yield everything that this rank holds from one update to the next one, copies and counters too."""
        copies = [self._mesh.get_group("replicate")] if self._mesh.ndim > 1 else []
        for param, spec in self._specs.items():
            in_tp_group = [self._tp_group] if spec.dim is None and self._tp_group.size() > 1 else []
            holders = (*copies, *in_tp_group)
            master = self._masters.get(param)
            for named in self._shards_of(param):
                yield HeldTensor(named.name, named.tensor, "never" if master is None else "by update", holders)
            if master is not None and self._adam is not None and "step" in self._adam.state[master]:
                yield HeldTensor(f"{spec.name}#step", self._adam.state[master]["step"], "by update")

    def load(self, read: Callable[[NamedShard], Tensor]) -> None:
        """Fill parameters and moments; `read` returns the saved elements of a shard as a flat tensor."""
        self._release_weights()
        with torch.no_grad():
            for param in self._specs:
                for named in self._shards_of(param):
                    named.tensor.copy_(read(named).view_as(named.tensor))

    def start_masters(self, weights: WeightSource) -> None:
        """Start master weights from what `weights` has at a higher precision than that of the parameters."""
        self._release_weights()
        for param, master in self._masters.items():
            first, _ = flat_range(param, self._mesh)
            place = (self._tp_group.rank(), self._tp_group.size())
            weights.fill_master(master.detach().view(-1), self._specs[param], *place, first, torch.bfloat16)

    def _release_weights(self) -> None:
        for stage in self._gathered:
            release_weights(stage)

    def _shards_of(self, param: nn.Parameter) -> Iterator[NamedShard]:
        """Yield this rank's shards of a parameter, frozen or not, and of its moments; none of one without rows here."""
        local = _local(param)
        if not local.numel():
            return
        yield self._named(param, "", local)
        if (master := self._masters.get(param)) is not None:
            assert self._adam is not None
            state = self._adam.state[master]
            for moment in self._moments_of(param):
                yield self._named(param, f"#{moment}", state[moment])

    def _named(self, param: nn.Parameter, suffix: str, tensor: Tensor) -> NamedShard:
        spec = self._specs[param]
        flat = flat_range(param, self._mesh)
        return NamedShard(spec.name + suffix, spec, self._tp_group.rank(), self._tp_group.size(), flat, tensor)

    def _start_moments(self, dtype: torch.dtype) -> None:
        """Create the optimizer's state now, not in the first step, so that every checkpoint holds all of it."""
        assert self._adam is not None
        for param, master in self._masters.items():
            state = self._adam.state[master]
            if not self._is_trained_by_muon(param):
                state["step"] = torch.tensor(0.0, device=master.device)
            for moment in self._moments_of(param):
                state[moment] = torch.zeros_like(master, dtype=dtype)

    def _is_trained_by_muon(self, param: nn.Parameter) -> bool:
        return self._specs[param].name in self._rates.matrices

    def _moments_of(self, param: nn.Parameter) -> tuple[str, ...]:
        return (MOMENTUM,) if self._is_trained_by_muon(param) else MOMENTS

    def _build_muon(self, decay_rate: float) -> Muon | None:
        """Build what steps the weights of linears, if anything does; copies of a shard compute the same."""
        weights = []
        for param, spec in self._specs.items():
            if not (param.requires_grad and self._is_trained_by_muon(param)):
                continue
            master, momentum = self._masters.get(param), None
            if master is not None:
                assert self._adam is not None, "there is one where there are masters"
                momentum = self._adam.state[master][MOMENTUM]
            divided = DividedWeight(spec, tuple(shard_ranges(param, self._mesh)))
            scale, matrices = self._rates.lr_scale_of(spec.name), self._rates.matrices[spec.name]
            weights.append(MuonWeight(divided, matrices, master, momentum, scale, self._rates.weight_decay))
        if not weights:
            return None
        shards = self._mesh.get_group(self._mesh.ndim - 1)
        return Muon(weights, shards, self._tp_group, decay_rate, self._rates.matrix_dtype, self._device)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, in the same memory."""
    assert isinstance(tensor, DTensor), "stages are sharded before their optimizer is built"
    local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local
