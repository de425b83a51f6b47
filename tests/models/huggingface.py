"""Convert weights of tiny `transformers` models to the layout and the parameter names of mmtrain."""

from collections.abc import Mapping

import torch
from torch import Tensor

from mmtrain.models.stage_module import StageModule

State = Mapping[str, Tensor]


def load(module: StageModule, weights: State) -> None:
    """Copy `weights` (by name in the module) into it; every parameter must get a value, padded rows zeros."""
    params = dict(module.named_parameters())
    assert params.keys() == weights.keys()
    with torch.no_grad():
        for name, param in params.items():
            value = weights[name]
            param.zero_()
            param[tuple(slice(n) for n in value.shape)] = value


def clip_unit(state: State, num_blocks: int, heads: int) -> dict[str, Tensor]:
    """Return the weights of CLIP's vision tower up to block `num_blocks`, and of LLaVA's projector."""
    state = {name.replace("vision_model.", ""): value for name, value in state.items()}  # transformers 4 and 5
    tower, projector = "model.vision_tower.", "model.multi_modal_projector."
    weights = {
        "layers.0.proj.weight": state[tower + "embeddings.patch_embedding.weight"].flatten(1),
        "layers.0.class_token": state[tower + "embeddings.class_embedding"],
        "layers.0.grid_positions": state[tower + "embeddings.position_embedding.weight"],
        "layers.0.pre_norm.weight": state[tower + "pre_layrnorm.weight"],
        "layers.0.pre_norm.bias": state[tower + "pre_layrnorm.bias"],
    }
    for i in range(num_blocks):
        block = _under(state, f"{tower}encoder.layers.{i}.")
        weights |= _encoder_block(i + 1, block, heads, ("layer_norm1", "layer_norm2"), "mlp.")
    for name, value in _under(state, projector).items():
        weights[f"layers.{num_blocks + 1}.{name}"] = value
    return weights


def _encoder_block(layer: int, block: State, heads: int, norms: tuple[str, str], mlp: str) -> dict[str, Tensor]:
    """Return a block of an encoder as layer `layer`; CLIP and Whisper have different names for `norms` and `mlp`."""
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


def llm_unit(state: State, num_blocks: int, kv_heads: int, bias: bool = False, tied: bool = False) -> dict[str, Tensor]:
    """Return the weights of Llama, or of Qwen2 with `bias`; `state` holds `model.*` and `lm_head.*`."""
    weights = {
        "layers.0.table.weight": state["model.embed_tokens.weight"],
        f"layers.{num_blocks + 1}.norm.weight": state["model.norm.weight"],
    }
    if not tied:
        weights[f"layers.{num_blocks + 1}.output.weight"] = state["lm_head.weight"]
    for i in range(num_blocks):
        block = _under(state, f"model.layers.{i}.")
        ours = f"layers.{i + 1}."
        for kind in ("weight", "bias") if bias else ("weight",):
            qkv = [block[f"self_attn.{x}_proj.{kind}"] for x in "qkv"]
            weights[f"{ours}self_attention.linear_qkv.{kind}"] = interleave(*qkv, kv_heads)
        weights |= {
            f"{ours}input_layernorm.weight": block["input_layernorm.weight"],
            f"{ours}self_attention.linear_proj.weight": block["self_attn.o_proj.weight"],
            f"{ours}pre_mlp_layernorm.weight": block["post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat([block["mlp.gate_proj.weight"], block["mlp.up_proj.weight"]]),
            f"{ours}mlp.linear_fc2.weight": block["mlp.down_proj.weight"],
        }
    return weights


def interleave(q: Tensor, k: Tensor, v: Tensor, kv_heads: int) -> Tensor:
    """Order rows as Megatron-core does: for each kv head its query heads, then its key, then its value."""
    groups = zip(*(x.chunk(kv_heads) for x in (q, k, v)), strict=True)
    return torch.cat([part for group in groups for part in group])


def _under(state: State, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
