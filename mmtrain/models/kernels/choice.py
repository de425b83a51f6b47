"""Which form of each operation a run uses."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mmtrain.errors import UserError
from mmtrain.models.kernels.grouped_gemm import grouped_gemm_problem
from mmtrain.models.kernels.liger import fused_problem
from mmtrain.models.kernels.weight_gradient import weight_gradient_problem
from mmtrain.models.shapes.layer_shape import DELTA_CHUNK_TOKENS
from mmtrain.models.shapes.loss_chunks import CHUNK_TOKENS, MIN_SAVED_SHARE, LossSizes
from mmtrain.recipe.settings.train_settings import KernelSetting

_FUSED_OPERATIONS = ("rotation of queries and keys", "SwiGLU", "residual sum and RMSNorm")  # all fused, or none
_LOSS = "loss over the vocabulary"
_EXPERTS = "linears of experts"
_DELTA_RULE = "gated delta rule"


@dataclass(frozen=True)
class KernelChoice:
    """The form of one operation."""

    operation: str
    form: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.form} ({self.reason})"


_DELTA_CHOICE = KernelChoice(
    _DELTA_RULE,
    "torch",
    f"chunks of {DELTA_CHUNK_TOKENS} tokens in fp32; kernels of flash-linear-attention are not used",
)


def uses_fused_kernels(setting: KernelSetting, device: torch.device) -> bool:
    """Return whether operations take their fused forms for the setting `train.kernels`.

    Raises:
        UserError: the setting demands them, and they cannot run on this device.
    """
    problem = None if setting == "torch" else fused_problem(device)
    if setting == "fused" and problem is not None:
        raise UserError(
            f"train.kernels: `fused` cannot be used here: {problem}. Usable on this machine: `auto` and `torch`."
        )
    return setting != "torch" and problem is None


def kernel_choices(
    setting: KernelSetting,
    device: torch.device,
    dtype: torch.dtype,
    loss: LossSizes | None = None,
    has_experts: bool = False,
    has_delta_nets: bool = False,
) -> tuple[KernelChoice, ...]:
    """Return the form of each operation on this device, with weights in `dtype`, and why.

    loss: the sizes of the loss over the vocabulary in the largest microbatch, where a plan is known.
    has_experts: whether the form of the experts' linears is asked for.
    has_delta_nets: whether that of the gated delta rule is.

    Raises:
        UserError: see `uses_fused_kernels`.
    """
    form, reason = "torch", "chosen by train.kernels"
    if uses_fused_kernels(setting, device):
        form, reason = "liger-kernel", "one kernel each way"
    elif setting == "auto":
        reason = fused_problem(device) or ""
    fused = tuple(KernelChoice(name, form, reason) for name in _FUSED_OPERATIONS)
    problem = weight_gradient_problem(device, dtype)
    return (
        *fused,
        KernelChoice("other activations, LayerNorm", "torch", "one kernel each way, or nothing to fuse with"),
        KernelChoice(
            "gradients of weights",
            "autograd" if problem else "their GEMM",
            problem or "adds them to the optimizer's buffer",
        ),
        *([_experts_choice(device, dtype)] if has_experts else []),
        *([_DELTA_CHOICE] if has_delta_nets else []),
        _loss_choice(loss),
        KernelChoice("AdamW", "torch's fused kernel", "it clips while it reads gradients"),
    )


def _experts_choice(device: torch.device, dtype: torch.dtype) -> KernelChoice:
    """Return the form of the experts' linears."""
    problem = grouped_gemm_problem(device, dtype)
    form = "one GEMM after another" if problem else "torch's grouped GEMM"
    return KernelChoice(_EXPERTS, form, problem or "one kernel for all experts of a rank")


def _loss_choice(sizes: LossSizes | None) -> KernelChoice:
    """Return the form of the loss over the vocabulary: Megatron-core's and liger-kernel's are never used."""
    saved = f"{MIN_SAVED_SHARE:.0%} of the loss's memory"
    form, chunks = "torch, for tokens with a target only", f"by {CHUNK_TOKENS:,} tokens at a time"
    if sizes is None:
        form += f", with all logits or {chunks}"
        liger = "liger-kernel's knows no padded ids, no tensor parallelism and not the optimizer's buffer"
        return KernelChoice(_LOSS, form, f"chunks where they save {saved}; {liger}")
    most, largest = sizes.most_tokens_at_once, f"the largest microbatch has {sizes.tokens:,} targets"
    reason = f"{largest}, for {sizes.ids:,} ids on each rank"
    if most is None:
        return KernelChoice(_LOSS, f"{form}, with all logits", f"chunks never save {saved} here; {reason}")
    form += f", {chunks}" if sizes.uses_chunks else ", with all logits"
    return KernelChoice(_LOSS, form, f"chunks save {saved} from {most + 1:,} tokens on; {reason}")


def describe_kernels(choices: Iterable[KernelChoice]) -> str:
    """Name in a short line the forms that depend on the machine and on the plan; `mmtrain doctor` says all, and why."""
    forms = {choice.operation: choice.form for choice in choices}
    more = [
        f"; {name}: {forms[key]}" for name, key in (("experts", _EXPERTS), (_DELTA_RULE, _DELTA_RULE)) if key in forms
    ]
    return f"kernels: {forms[_FUSED_OPERATIONS[0]]}; loss: {forms[_LOSS]}{''.join(more)}"
