"""Fused kernels of other libraries that know packed sequences: the FlashAttention family, on GPUs, in bf16 and fp16.

Each is found by importing its function, because a package of that name proves nothing: FlashAttention-2 and -4 share
the folder `flash_attn`, and with the latter alone `import flash_attn` succeeds and brings no function. Arguments are
passed by keyword: FlashAttention-4 has another fourth parameter than the others.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.attention.options import AttentionBackend, AttentionOptions
from mmtrain.models.attention.sequence_layout import SequenceLayout

HEAD_ALIGNMENT = 8  # features; kernels load 16 bytes at a time
# For these widths FlashAttention-4 4.0.0b36 cannot compile its backward for Hopper without a causal mask: its tile of
# 80 queries does not divide. Other widths from 8 to 256 compile (both passes, without a GPU).
_NOT_COMPILED_UNMASKED = range(97, 113)  # features
_COMPILED_UNMASKED = 120  # features; the kernel computes them as 128, like those above
_HALF_PRECISIONS = (torch.float16, torch.bfloat16)
_FLASH_ATTN_KEYWORDS = {
    name: name
    for name in (
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("softmax_scale", "causal", "window_size"),
    )
}
_VARLEN_KEYWORDS = {  # it knows a causal mask by its window
    "q": "query",
    "k": "key",
    "v": "value",
    "cu_seqlens_q": "cu_seq_q",
    "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q",
    "max_seqlen_k": "max_k",
    "softmax_scale": "scale",
    "window_size": "window_size",
}


@dataclass(frozen=True)
class FusedKernel:
    """A function of another library that attends inside packed sequences."""

    module: str
    function: str
    keywords: Mapping[str, str]  # FlashAttention-2's name of each argument that we pass -> this function's
    gpus: str  # that it is made for
    widest_head: Callable[[int], int]  # by the major compute capability of the GPU, in features; 0: not on this GPU
    install: str  # how to get it
    unlimited: int | None = -1  # in `window_size`: no limit on this side

    def load(self) -> Callable[..., Any]:
        """Import the function; raise whatever importing raises, or AttributeError if the module lacks it."""
        function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return function


def _from_ampere(major: int) -> int:
    return 256 if major >= 8 else 0


def _on_hopper(major: int) -> int:
    return 256 if major == 9 else 0


def _of_flash_attn_4(major: int) -> int:
    # It has kernels for other GPUs too, which use the instructions of Ampere, as FlashAttention-2 does.
    return {9: 256, 10: 128, 11: 128}.get(major, 0)


FUSED_KERNELS: dict[AttentionBackend, FusedKernel] = {
    "flash_attn_3": FusedKernel(
        "flash_attn_interface", "flash_attn_varlen_func", _FLASH_ATTN_KEYWORDS, "Hopper GPUs", _on_hopper,
        "FlashAttention-3 has no wheels: build the folder `hopper` of github.com/Dao-AILab/flash-attention",
    ),
    "flash_attn_4": FusedKernel(
        "flash_attn.cute", "flash_attn_varlen_func", _FLASH_ATTN_KEYWORDS, "Hopper and Blackwell GPUs of data centers",
        _of_flash_attn_4, "pip install 'mmtrain[cuda]'", unlimited=None,
    ),
    "flash_attn": FusedKernel(
        "flash_attn", "flash_attn_varlen_func", _FLASH_ATTN_KEYWORDS, "Ampere GPUs and newer", _from_ampere,
        "pip install 'mmtrain[flash-attn]', which compiles for up to an hour",
    ),
    "varlen": FusedKernel(
        "torch.nn.attention.varlen", "varlen_attn", _VARLEN_KEYWORDS, "Ampere GPUs and newer", _from_ampere,
        "install torch 2.11 or newer",
    ),
}  # fmt: skip


def fused_kernel_problem(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, head_dim: int
) -> str | None:
    """Return why this backend cannot compute attention with heads of `head_dim` features here; None if it can."""
    kernel = FUSED_KERNELS[backend]
    if device.type != "cuda":
        return f"it needs a CUDA device, and this run uses `{device.type}`"
    if dtype not in _HALF_PRECISIONS:
        return f"it computes in bf16 or fp16, and this run uses {str(dtype).removeprefix('torch.')}"
    major, minor = torch.cuda.get_device_capability(device)
    widest = kernel.widest_head(major)
    if not widest:
        name = torch.cuda.get_device_name(device)
        return f"it is for {kernel.gpus}, and this is a {name} (compute capability {major}.{minor})"
    if head_dim > widest:
        return f"on this GPU it takes heads of up to {widest} features, and these have {head_dim}"
    return _import_problem(kernel)


def _import_problem(kernel: FusedKernel) -> str | None:
    try:
        parameters = _parameters(kernel.load())
    except ModuleNotFoundError as error:
        if error.name is not None and f"{kernel.module}.".startswith(f"{error.name}."):
            return f"{kernel.module} is not installed ({kernel.install})"
        return f"importing {kernel.module} fails: {error} ({kernel.install})"
    except AttributeError:
        return f"the installed {kernel.module} has no {kernel.function} ({kernel.install})"
    except Exception as error:  # whatever a broken build or a missing library of CUDA raises
        return f"importing {kernel.module} fails: {type(error).__name__}: {error} ({kernel.install})"
    if lacking := [keyword for keyword in kernel.keywords.values() if keyword not in parameters]:
        names = ", ".join(f"`{keyword}`" for keyword in lacking)
        return f"the installed {kernel.module}.{kernel.function} takes no {names} ({kernel.install})"
    return None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def padded_head_dim(head_dim: int, backend: AttentionBackend, causal: bool) -> int:
    """Return the width of heads with which the kernel of `backend` is called."""
    if backend == "flash_attn_4" and not causal and head_dim in _NOT_COMPILED_UNMASKED:
        return _COMPILED_UNMASKED
    return -(-head_dim // HEAD_ALIGNMENT) * HEAD_ALIGNMENT


def attend_by_fused_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    options: AttentionOptions,
    contexts: SequenceLayout | None = None,
) -> Tensor:
    """Call the kernel of `options.backend`, with heads padded by zeros to the next width that kernels take.

    Zeros add nothing to scores, and the features that they add to the output are dropped. Inside, kernels round widths
    up further (100 to 128), so that the padding costs copies and no arithmetic.

    contexts: where keys and values lie, one sequence of them for each of queries; None: where the queries do.
    """
    kernel = FUSED_KERNELS[options.backend]
    head_dim = q.shape[-1]
    keys = layout if contexts is None else contexts
    if padding := padded_head_dim(head_dim, options.backend, options.causal) - head_dim:
        q, k, v = (F.pad(x, (0, padding)) for x in (q, k, v))
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": layout.cu_seqlens(q.device),
        "cu_seqlens_k": keys.cu_seqlens(q.device),
        "max_seqlen_q": layout.max_length,
        "max_seqlen_k": keys.max_length,
        "softmax_scale": head_dim**-0.5 if options.scale is None else options.scale,
        "causal": options.causal,
        # How many tokens before and behind itself a token attends to.
        "window_size": (
            options.window - 1 if options.window else kernel.unlimited,
            0 if options.causal else kernel.unlimited,
        ),
    }
    function = kernel.load()
    named = {kernel.keywords[name]: value for name, value in arguments.items() if name in kernel.keywords}
    if "enable_gqa" in _parameters(function):  # before torch 2.12 `varlen_attn` groups queries without being asked
        named["enable_gqa"] = q.shape[1] != k.shape[1]
    if "deterministic" in _parameters(function):  # torch's own kernel looks for itself
        named["deterministic"] = torch.are_deterministic_algorithms_enabled()
    out = function(**named)
    attended: Tensor = out[0] if isinstance(out, tuple) else out  # some return the log-sum-exp of scores beside it
    return attended[..., :head_dim]
