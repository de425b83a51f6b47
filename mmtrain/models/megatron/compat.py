"""What Megatron-core needs to run on a CPU, where on CUDA this module changes nothing; and what its versions rename.

Megatron-core asks `torch.cuda.current_device()` for "the" device and compares tensor types with CUDA names.
`prepare_megatron` answers the first question for the whole process. The second one comes up only while an optimizer is
created or steps, so `optimizer_scope` translates the names there and nowhere else: translating them everywhere would
double the time of a training step.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mmtrain.models.megatron.triton_stand_in import triton_stands_in


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Leave functions that a module decorates with `torch.compile` as they are.

    Megatron-core decorates its fused functions, none of which we call, and the decorator loads torch's compilers: a
    third of the time that our imports take, and 66 MiB of every process.
    """
    compile_function = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_function


@contextlib.contextmanager
def _no_remark_on_cuda() -> Iterator[None]:
    """Suppress a line that torch logs where a CUDA toolkit is installed and no GPU: we compile nothing with it."""
    logger = logging.getLogger("torch.utils.cpp_extension")  # which Megatron-core imports
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _not_installed(*names: str) -> Iterator[None]:
    """Let modules that are not loaded yet look as if they were not installed.

    Megatron-core loads trackers that it could log to, which takes a second of every process where they are there.
    """
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


with (
    warnings.catch_warnings(),
    _nothing_compiled(),
    _no_remark_on_cuda(),
    triton_stands_in(),
    _not_installed("wandb", "torch.utils.tensorboard"),
):
    # Warnings at import: optional CUDA packages are absent, and torch renamed some of its API.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed", category=UserWarning)
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    warnings.filterwarnings(
        "ignore", message="The following imports from `dynamic_context", category=DeprecationWarning
    )
    import megatron.core.distributed
    import megatron.core.optimizer
    import megatron.core.transformer.transformer_layer  # noqa: F401
    from megatron.core import parallel_state
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import layers as tensor_parallel_layers
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

_CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
}


def _do_nothing(*_: object, **__: object) -> None:
    """Replace CUDA calls that have no meaning on a CPU."""


_REPLACED: dict[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,  # Megatron-core passes it as `device=` when it allocates buffers
    "current_stream": _do_nothing,  # 0.19 asks for it before each reduction, and uses it for CUDA graphs only
    "synchronize": _do_nothing,
    "empty_cache": _do_nothing,
}
_ORIGINAL = {name: getattr(torch.cuda, name) for name in _REPLACED}


def no_cuda_graphs() -> dict[str, list[str]]:
    """Return the argument of `TransformerConfig` that leaves out CUDA graphs; 0.19 renamed it."""
    names = {field.name for field in fields(TransformerConfig)}
    return {"cuda_graph_modules" if "cuda_graph_modules" in names else "cuda_graph_scope": []}


def mlp_builder(submodules: Any, ffn_hidden_size: int) -> Any:
    """Return what builds the MLP of a `TransformerLayer`; 0.19 logs a line for each that is a `ModuleSpec`."""
    if hasattr(MLP, "as_mlp_submodule"):
        return partial(MLP.as_mlp_submodule, submodules=submodules, ffn_hidden_size=ffn_hidden_size)
    return ModuleSpec(module=MLP, params={"ffn_hidden_size": ffn_hidden_size}, submodules=submodules)


def param_layout(chunk: torch.nn.Module, dp_size: int, ddp_config: Any) -> dict[str, Any]:
    """Return the argument of `DistributedDataParallel` without which 0.19 logs a line; 0.16 computes it by itself.

    All parameters are in one bucket, as they are where gradients are not reduced during the backward.
    """
    if not hasattr(DistributedOptimizer, "compute_full_param_layout"):
        return {}
    params = [param for param in chunk.parameters() if param.requires_grad]
    return {"full_param_layout": DistributedOptimizer.compute_full_param_layout(params, None, dp_size, ddp_config)}


def prepare_megatron(device: torch.device) -> None:
    """Make Megatron-core allocate on `device` in this process. May be called any number of times.

    On a CPU it replaces functions of `torch.cuda`; `restore_cuda` gives them back.
    """
    restore_cuda()
    if device.type == "cpu":
        for name, function in _REPLACED.items():
            setattr(torch.cuda, name, function)
    # Suppress its advice to set CUDA_DEVICE_MAX_CONNECTIONS=1: see "One hardware queue" in docs/decisions/training.md.
    tensor_parallel_layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    # torch 2.13 renamed these functions, and Megatron-core calls them in every reduction.
    renamed = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def restore_cuda() -> None:
    """Give `torch.cuda` the functions back that `prepare_megatron` replaced, for code that uses the GPU itself."""
    for name, function in _ORIGINAL.items():
        setattr(torch.cuda, name, function)


class _CudaNamesOnCpu(TorchFunctionMode):
    """Let code that asks for "cuda" work on CPU tensors."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return _CUDA_TYPE_NAMES.get(result, result)
        return result


def optimizer_scope(device: torch.device) -> AbstractContextManager[object]:
    """Return the context for creating and stepping a Megatron-core optimizer; it does nothing on CUDA."""
    return _CudaNamesOnCpu() if device.type == "cpu" else contextlib.nullcontext()
