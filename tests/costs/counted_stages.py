"""Count what a forward and backward of one stage holds: the bytes that autograd saves, and the most alive at once.

On torch's `meta` device stages of any size have shapes without numbers. Stand-ins there save what a GPU's fused kernels
save.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from mmtrain.models import build_stage as stage_builder
from mmtrain.models.stage import host_offload
from mmtrain.models.stage.stage_inputs import UnitInput
from mmtrain.models.stage.stage_module import StageModule
from tests.models.live_tensors import LiveTensors


@dataclass(frozen=True)
class Counted:
    """Bytes of forwards and backwards, without weights and their accumulated gradients."""

    saved: int  # by autograd, between forward and backward
    peak: int  # of all tensors alive at once
    host: int = 0  # copied to host memory meanwhile


@contextmanager
def large_stages_on_meta() -> Iterator[None]:
    """Draw no weights; stand in for fused kernels of a GPU, in whose place `meta` keeps scores and fp32 copies."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(stage_builder, "initialize_parameters", lambda *_: None))
        stack.enter_context(patch.object(stage_builder, "choose_backend", lambda *_: "varlen"))
        stack.enter_context(patch("torch.nn.functional.rms_norm", _fused_rms_norm))
        stack.enter_context(patch("torch.nn.attention.varlen.varlen_attn", _varlen_stand_in))
        yield


def count(module: StageModule, inputs: UnitInput, *hidden: Tensor | None) -> Counted:
    """Run forwards, one for each of `hidden`, then their backwards in the same order; copies to the host do not count.

    Gradients of weights are freed at once, as where they are accumulated elsewhere.
    """
    sums = []
    for name, param in module.named_parameters():
        if ".mlp." in name:  # chunks of an MLP add their gradients where the optimizer sums them
            sums.append(torch.empty_like(param, dtype=torch.float32))
            param.main_grad = sums[-1]  # type: ignore[attr-defined]
    live, saved = LiveTensors(), SavedStorages(module)
    module_device = next(module.parameters()).device
    on_host: list[Tensor] = []  # for as long as it is counted, so that no other storage gets the address of one
    live.ignore([*module.parameters(), *sums])

    def on_meta(tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            on_host.append(torch.empty_like(tensor))
        live.ignore(on_host[-1:])
        return on_host[-1]

    with live, patch.object(host_offload, "empty_on_host", on_meta):
        with saved:
            ends = [_end(module.run(module.context(inputs, {}), received, module.indices)) for received in hidden]
        for entry, like in ends:
            gradient = torch.empty(like.shape, dtype=like.dtype, device=module_device)
            torch.autograd.backward([entry], [gradient])
    return Counted(saved.nbytes, live.peak, sum(copy.untyped_storage().nbytes() for copy in on_host))


def _end(out: Tensor) -> tuple[GradientEdge, Tensor]:
    """Return where the gradient of a stage's output enters, and its form; a run drops the output like this, too."""
    with _disable_current_modes():
        return get_gradient_edge(out), torch.empty(out.shape, dtype=out.dtype, device="meta")


class SavedStorages(torch.autograd.graph.saved_tensors_hooks):
    """While active, count what autograd saves of a stage's forward, each storage once, without weights.

    Gradients of weights are freed as soon as a backward has made them.
    """

    def __init__(self, module: StageModule) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._device = next(module.parameters()).device
        self._lasting = {p.untyped_storage()._cdata for p in module.parameters()}
        self._nbytes_of: dict[int, int] = {}  # autograd holds the storages, so their addresses are their own
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(_drop_gradient)

    @property
    def nbytes(self) -> int:
        """The bytes of all storages."""
        return sum(self._nbytes_of.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.device == self._device and storage._cdata not in self._lasting:
            self._nbytes_of[storage._cdata] = storage.nbytes()
        return tensor


def _drop_gradient(param: Tensor) -> None:
    param.grad = None


class _FlashLike(torch.autograd.Function):
    """Saves what a fused kernel saves: queries, keys, values, outputs and a statistic of each softmax."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FusedRmsNorm(torch.autograd.Function):
    """Saves what torch's kernel for CUDA saves: its input, the weight, and a statistic of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _fused_rms_norm(x: Tensor, _shape: object, weight: Tensor, _eps: object) -> Tensor:
    out: Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def _varlen_stand_in(query: Tensor, key: Tensor, value: Tensor, **_: object) -> Tensor:
    out: Tensor = _FlashLike.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out
