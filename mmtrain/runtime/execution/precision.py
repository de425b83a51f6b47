"""The type of weights and activations on this device."""

from typing import Literal

import torch

from mmtrain.costs import Precision
from mmtrain.errors import LaunchError

DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


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
