"""Which attention backend each unit of a run uses, in words."""

from dataclasses import dataclass

import torch

from mmtrain.models import ModelShape
from mmtrain.models.attention import FUSED_KERNELS, backend_problems, choose_backend, padded_head_dim
from mmtrain.models.shapes.layer_shape import BLOCK_KINDS, Attention
from mmtrain.recipe import Recipe


@dataclass(frozen=True)
class AttentionChoice:
    """What a run says about its attention before the first step."""

    summary: str
    warnings: tuple[str, ...]  # of units whose attention is slower than it could be


def describe_attention(recipe: Recipe, model: ModelShape, device: torch.device, dtype: torch.dtype) -> AttentionChoice:
    """Name the backend of each unit on this device, and say why a unit on a GPU has no fused one."""
    uses: dict[str, str] = {}
    warnings = []
    for unit in model.units:
        mixers = (layer.mixer for layer in unit.layers if layer.kind in BLOCK_KINDS)
        attending = [mixer for mixer in mixers if isinstance(mixer, Attention)]
        if not attending:
            continue
        attention = max(attending, key=lambda mixer: mixer.head_dim)  # a unit has one backend
        head_dim = attention.head_dim
        backend = choose_backend(recipe.train.attention, device, dtype, head_dim)
        uses[unit.name] = backend
        width = padded_head_dim(head_dim, backend, attention.causal)
        if backend in FUSED_KERNELS and width != head_dim:
            uses[unit.name] += f" (heads of {head_dim} features padded to {width})"
        if backend == "sdpa" and recipe.train.attention == "auto" and device.type == "cuda":
            problems = backend_problems(device, dtype, head_dim)
            reasons = "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem)
            warnings.append(
                f"attention of {unit.name} is slow: sdpa computes sequences of each length in a call of its own, since "
                f"no fused kernel works here ({reasons})"
            )
    if len(set(uses.values())) == 1:
        summary = next(iter(uses.values()))
    else:
        summary = ", ".join(f"{unit} {use}" for unit, use in uses.items())
    return AttentionChoice(f"attention: {summary}", tuple(warnings))
