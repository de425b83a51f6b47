"""The type of weights and activations on this device, and whether a run repeats its bits."""

import os
from typing import Literal

import torch

from mmtrain.costs import Precision
from mmtrain.errors import LaunchError

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
# cuBLAS shares its workspace among streams unless this is set, and sums in another order from run to run. It reads the
# variable when it starts, and takes this value or `:16:8`.
CUBLAS_WORKSPACE_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the torch type for a plan's precision; raise LaunchError if `device` cannot compute in it.

    Falling back to another precision would invalidate the memory and the step time that the plan predicts.
    """
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise LaunchError(
            f"the plan is made for bf16, which {torch.cuda.get_device_name(device)} cannot compute in; "
            "set train.precision: fp32 and make a new plan with `mmtrain plan`"
        )
    return DTYPES[precision]


def precision_on_device(chosen: Literal["auto", "fp32", "bf16"], device: torch.device) -> Precision:
    """Resolve `train.precision` by the device, for evaluation, which may run where the model was not trained."""
    if chosen != "auto":
        return chosen
    return "bf16" if device.type == "cuda" else "fp32"


def set_determinism(deterministic: bool) -> None:
    """Choose between torch's fastest operations and those that repeat their bits; call this before the first GEMM.

    Kernels of attention ask torch for this choice. An operation that has no deterministic form raises RuntimeError and
    names itself.
    """
    if deterministic:
        os.environ.setdefault(CUBLAS_WORKSPACE_VARIABLE, CUBLAS_WORKSPACE)
        # Every buffer is written before it is read.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic != torch.are_deterministic_algorithms_enabled():  # torch loads its compilers to be told
        torch.use_deterministic_algorithms(deterministic)
