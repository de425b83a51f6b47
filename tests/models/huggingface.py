"""Convert the weights of a tiny Whisper of `transformers` to the layout and the parameter names of mmtrain."""

from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def _encoder_block(layer: int, block: State, heads: int, norms: tuple[str, str], mlp: str) -> dict[str, Tensor]:
    """Return a block of an encoder as layer `layer`."""
    weights = {}
    for kind in ("weight", "bias"):
        qkv = [block[f"self_attn.{x}_proj.{kind}"] for x in "qkv"]
        weights |= {
            f"layers.{layer}.input_layernorm.{kind}": block[f"{norms[0]}.{kind}"],
            f"layers.{layer}.self_attention.linear_qkv.{kind}": interleave(*qkv, heads),
            f"layers.{layer}.self_attention.linear_proj.{kind}": block[f"self_attn.out_proj.{kind}"],
            f"layers.{layer}.pre_mlp_layernorm.{kind}": block[f"{norms[1]}.{kind}"],
            f"layers.{layer}.mlp.linear_fc1.{kind}": block[f"{mlp}fc1.{kind}"],
            f"layers.{layer}.mlp.linear_fc2.{kind}": block[f"{mlp}fc2.{kind}"],
        }
    return weights


def whisper_unit(state: State, num_blocks: int, heads: int) -> dict[str, Tensor]:
    """Return the weights of Whisper's encoder without a projector; its keys have no bias, so ours is 0."""
    weights = {}
    for conv in ("conv1", "conv2"):
        weights[f"layers.0.{conv}.weight"] = state[f"{conv}.weight"].flatten(1)
        weights[f"layers.0.{conv}.bias"] = state[f"{conv}.bias"]
    for i in range(num_blocks):
        block = _under(state, f"layers.{i}.")
        block["self_attn.k_proj.bias"] = torch.zeros_like(block["self_attn.q_proj.bias"])
        weights |= _encoder_block(i + 1, block, heads, ("self_attn_layer_norm", "final_layer_norm"), "")
    for kind in ("weight", "bias"):
        weights[f"layers.{num_blocks + 1}.post_norm.{kind}"] = state[f"layer_norm.{kind}"]
    return weights


def interleave(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Order rows as Megatron-core does: for each kv head its query heads, then its key, then its value."""
    groups = zip(*(x.chunk(kv_heads) for x in (q, k, v)), strict=True)
    return torch.cat([part for group in groups for part in group])


def _under(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
