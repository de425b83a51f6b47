"""The optimizer of one rank: one gradient norm over all units, clipping, and a step of each unit."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.optim.clip_factors import ClipFactors, clip_factors
from mmtrain.models.optim.held_state import HeldTensor
from mmtrain.models.optim.parameter_specs import NamedShard, WeightSource
from mmtrain.recipe.settings.train_settings import OptimizerSettings
from mmtrain.runtime.execution.state_sums import StateSums
from mmtrain.runtime.world import World


class UnitOptimizer(Protocol):
    """The optimizer of one unit's parameters on this rank, as `Optimizer` needs it.

    Megatron's buffers with ZeRO-1 implement it (`models/megatron/zero_adamw.py`); FSDP2 can.
    """

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""

    def tied_gradient(self) -> Tensor | None:
        """Return the gradient of the weight that another stage holds too, if this rank has one."""

    def reduce_grads(self, chunk: int, bucket: int) -> None:
        """Start to sum the gradients of a chunk's bucket over replicas."""

    def finish_reduction(self) -> None:
        """Wait until the gradients are summed; with sequence parallelism, sum some of them over the TP group too."""

    def grad_sq_sum(self) -> Tensor:
        """Return the sum of squares of the reduced gradient elements that this rank owns, in float64.

        Over all ranks each element counts once.
        """

    def step(self, lr: float, clip: ClipFactors) -> None:
        """Divide the gradients by `clip.divisor` and update this rank's shard of the parameters.

        Nothing changes where `clip.skip` is 1. The host does not wait for the device. All ranks of the unit that hold
        shards of the same weights call this together: for Muon they exchange them.
        """

    def count_update(self) -> None:
        """Count the update of the last `step`, which was made; called once the host knows."""

    def start_gather(self, chunk: int, bucket: int) -> None:
        """Start to gather the updated parameters of a chunk's bucket on every replica."""

    def finish_gather(self, chunk: int, bucket: int) -> None:
        """Wait until the parameters of a chunk's bucket are gathered."""

    def gather_params(self) -> None:
        """Gather the updated parameters of all chunks on every replica."""

    def gradients(self) -> Iterator[NamedShard]:
        """Yield this rank's shards of the reduced gradients, named like the parameters."""

    def shards(self) -> Iterator[NamedShard]:
        """Yield everything of the unit that a checkpoint must hold; each element is on exactly one rank."""

    def held(self) -> Iterator[HeldTensor]:
        """Yield everything of the unit that this rank holds from one update to the next one."""

    def load(self, read: Callable[[NamedShard], Tensor]) -> None:
        """Fill parameters and optimizer state; `read` returns the stored piece that a shard describes."""

    def start_masters(self, weights: WeightSource) -> None:
        """Start master weights from what `weights` has at a higher precision than that of the parameters."""

    def set_num_updates(self, value: int) -> None:
        """Continue after `value` updates; Adam's bias correction depends on it."""


class GradientFreeUpdate(Protocol):
    """Changes weights by what a step's backwards counted."""

    def reset(self) -> None:
        """Forget what was counted."""

    def step(self, skip: Tensor) -> None:
        """Change the weights, unless `skip` is 1; the host does not wait for the device."""

    def weights(self) -> Iterable[Tensor]:
        """Return the weights that it changes, on this rank."""


class JoinedOptimizers:
    """The optimizer of a unit whose parameters have replicas on different ranks: one for each kind of them."""

    def __init__(self, parts: Sequence[UnitOptimizer]) -> None:
        self._parts = parts

    def zero_grad(self) -> None:
        """See `UnitOptimizer`, also of what follows."""
        for part in self._parts:
            part.zero_grad()

    def tied_gradient(self) -> Tensor | None:
        """Return that of the part that has one."""
        gradients = (part.tied_gradient() for part in self._parts)
        return next((gradient for gradient in gradients if gradient is not None), None)

    def reduce_grads(self, chunk: int, bucket: int) -> None:
        """Start the reductions of all parts."""
        for part in self._parts:
            part.reduce_grads(chunk, bucket)

    def finish_reduction(self) -> None:
        """Wait for the reductions of all parts."""
        for part in self._parts:
            part.finish_reduction()

    def grad_sq_sum(self) -> Tensor:
        """Return the sum over all parts."""
        return torch.stack([part.grad_sq_sum() for part in self._parts]).sum()

    def step(self, lr: float, clip: ClipFactors) -> None:
        """Update all parts."""
        for part in self._parts:
            part.step(lr, clip)

    def count_update(self) -> None:
        """Count the update of all parts."""
        for part in self._parts:
            part.count_update()

    def start_gather(self, chunk: int, bucket: int) -> None:
        """Start to gather the parameters of all parts."""
        for part in self._parts:
            part.start_gather(chunk, bucket)

    def finish_gather(self, chunk: int, bucket: int) -> None:
        """Wait for the parameters of all parts."""
        for part in self._parts:
            part.finish_gather(chunk, bucket)

    def gather_params(self) -> None:
        """Gather the parameters of all parts."""
        for part in self._parts:
            part.gather_params()

    def gradients(self) -> Iterator[NamedShard]:
        """Yield those of all parts."""
        return chain.from_iterable(part.gradients() for part in self._parts)

    def shards(self) -> Iterator[NamedShard]:
        """Yield those of all parts."""
        return chain.from_iterable(part.shards() for part in self._parts)

    def held(self) -> Iterator[HeldTensor]:
        """Yield those of all parts."""
        return chain.from_iterable(part.held() for part in self._parts)

    def load(self, read: Callable[[NamedShard], Tensor]) -> None:
        """Fill all parts."""
        for part in self._parts:
            part.load(read)

    def start_masters(self, weights: WeightSource) -> None:
        """Start the master weights of all parts."""
        for part in self._parts:
            part.start_masters(weights)

    def set_num_updates(self, value: int) -> None:
        """Continue all parts after `value` updates."""
        for part in self._parts:
            part.set_num_updates(value)


class Optimizer:
    """Steps all units of one rank together."""

    def __init__(
        self,
        units: Mapping[str, UnitOptimizer],
        settings: OptimizerSettings,
        world: World,
        tied_group: dist.ProcessGroup | None,
        without_gradient: Sequence[GradientFreeUpdate] = (),
    ) -> None:
        self.units, self._settings, self._world, self._tied_group = units, settings, world, tied_group
        self._without_gradient = without_gradient
        self._num_updates = 0
        self._has_updated_shards = False  # since parameters were gathered
        self._norm = torch.zeros((), dtype=torch.float64)  # of the last step's gradients
        self._wait_for_reader: Callable[[], None] = _nothing_to_wait_for
        self._sums: StateSums | None = None

    @property
    def num_updates(self) -> int:
        """Updates so far, equal for all units; steps with a gradient that is not finite make none."""
        return self._num_updates

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        self._num_updates = value
        for unit in self.units.values():
            unit.set_num_updates(value)

    def start_masters(self, weights: WeightSource) -> None:
        """Start master weights from what `weights` has at a higher precision than that of the parameters."""
        for unit in self.units.values():
            unit.start_masters(weights)

    def held(self) -> Iterator[HeldTensor]:
        """Yield everything of all units that this rank holds from one update to the next one."""
        without_gradient = {weight.data_ptr() for update in self._without_gradient for weight in update.weights()}
        for unit in self.units.values():
            for held in unit.held():
                is_updated = held.tensor.data_ptr() in without_gradient
                yield replace(held, changes="by update") if is_updated else held

    def watch_state(self, sums: StateSums) -> None:
        """Let `sums` look at what this rank holds, before and after each update from now on."""
        self._sums = sums

    def checked_sums(self) -> Mapping[str, int]:
        """Return the sums of what this rank holds, by name, as they were when it was last checked; none unwatched."""
        return {} if self._sums is None else self._sums.checked

    @property
    def checked_step(self) -> int | None:
        """The step after which this rank's state was last checked; None where nothing watches it."""
        return None if self._sums is None else self._sums.checked_step

    def hold_update(self, wait: Callable[[], None]) -> None:
        """Call `wait` before the next update, too: until then something reads weights and moments."""
        wait_for_earlier = self._wait_for_reader

        def wait_for_all() -> None:
            wait_for_earlier()
            wait()

        self._wait_for_reader = wait_for_all

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for unit in self.units.values():
            unit.zero_grad()
        for update in self._without_gradient:
            update.reset()

    def reduce_shared(self) -> None:
        """Sum the tied embedding's gradient over the two stages that hold it."""
        gradient = self.units["llm"].tied_gradient()
        if gradient is None:
            return  # the matrix is frozen, so its copy on the other end has no gradient either
        assert self._tied_group is not None, "ReduceShared on a rank without the tied weight"
        dist.all_reduce(gradient, group=self._tied_group)

    def reduce_grads(self, unit: str, chunk: int, bucket: int) -> None:
        """Start to sum the gradients of a bucket of a model chunk of the unit over its replicas."""
        self.units[unit].reduce_grads(chunk, bucket)

    def finish_reductions(self) -> None:
        """Wait for the reductions of all units."""
        for unit in self.units.values():
            unit.finish_reduction()

    def step(self, lr: float) -> None:
        """Clip by the norm of all reduced gradients and update.

        The norm is that of the whole model, each element counted once, so every rank decides alike: if it is not
        finite, no rank changes anything. It stays on the device, which decides; `finish_step` reads it.
        """
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for unit in self.units.values():
            total += unit.grad_sq_sum()
        if self._world.size > 1:
            dist.all_reduce(total)
        self._norm = total.sqrt()
        clip = clip_factors(self._norm, self._settings.clip_norm)
        self._wait_for_reader()
        self._wait_for_reader = _nothing_to_wait_for
        if self._sums is not None:
            self._sums.before_update()
        for unit in self.units.values():
            unit.step(lr, clip)
        for update in self._without_gradient:
            update.step(clip.skip)
        if self._sums is not None:
            self._sums.after_update()
        self._has_updated_shards = True

    def finish_step(self) -> tuple[float, bool]:
        """Return the gradient norm of the last step, and whether the update was made; waits for the device."""
        norm = float(self._norm)
        is_updated = math.isfinite(norm)
        if is_updated:
            self._num_updates += 1
            for unit in self.units.values():
                unit.count_update()
        return norm, is_updated

    def start_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """Start to gather the parameters of a bucket that the last step has updated, on every replica."""
        self.units[unit].start_gather(chunk, bucket)
        self._has_updated_shards = False

    def finish_gather(self, unit: str, chunk: int, bucket: int) -> None:
        """Wait until the parameters of a bucket are gathered."""
        self.units[unit].finish_gather(chunk, bucket)

    def gather_params(self) -> None:
        """Gather what the last step has updated, for forwards outside of training steps; all ranks call this together.

        A training step gathers by itself, at its start.
        """
        if self._has_updated_shards:
            for unit in self.units.values():
                unit.gather_params()
            self._has_updated_shards = False


def _nothing_to_wait_for() -> None:
    """Return at once."""
