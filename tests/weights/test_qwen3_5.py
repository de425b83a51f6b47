"""Folders of Qwen3.5: what their configs say, what is refused, and tensors that export copies."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mmtrain.costs import num_parameters
from mmtrain.errors import RecipeError
from mmtrain.models.shapes.layer_shape import Attention, GatedDeltaNet
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import Recipe
from tests.families.configs import write_config
from tests.weights.comparison import content, export_again, unit_stage
from tests.weights.pretrained import qwen3_5, qwen3_5_moe, qwen3_5_moe_text, qwen3_5_text, recipe_from, save

TEXT_27B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
    "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 17408,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "use_cache": True,
    "vocab_size": 248320, "partial_rotary_factor": 0.25,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip
QWEN3_5_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
    "text_config": TEXT_27B, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
    "video_token_id": 248057, "vision_end_token_id": 248054, "vision_start_token_id": 248053,
    "vision_config": {
        "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
        "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "model_type": "qwen3_5",
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 5120, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip
TEXT_35B: dict[str, Any] = {
    **{key: value for key, value in TEXT_27B.items() if key != "intermediate_size"},
    "hidden_size": 2048, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
    "linear_num_value_heads": 32, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
    "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
}  # fmt: skip
QWEN3_5_35B: dict[str, Any] = {
    **QWEN3_5_27B, "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "text_config": TEXT_35B,
    "vision_config": {**QWEN3_5_27B["vision_config"], "model_type": "qwen3_5_moe", "out_hidden_size": 2048},
}  # fmt: skip
PICTURES = ("data.image.min_pixels=16", "data.image.max_pixels=576")
STACKED_LINEARS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def _folder(path: Path, **text: Any) -> Path:
    return write_config(path, {**QWEN3_5_27B, "text_config": {**TEXT_27B, **text}})


def _folder_with_experts(path: Path, **text: Any) -> Path:
    return write_config(path, {**QWEN3_5_35B, "text_config": {**TEXT_35B, **text}})


def _assert_same_numbers_of_parameters(recipe: Recipe, theirs: Any) -> None:
    units = {unit.name: unit for unit in build_model_shape(recipe).units}
    expected = {"vision": theirs.model.visual, "llm": theirs.model.language_model}
    numbers = {name: sum(param.numel() for param in module.parameters()) for name, module in expected.items()}
    numbers["llm"] += theirs.lm_head.weight.numel()
    assert {name: sum(map(num_parameters, unit.layers)) for name, unit in units.items()} == numbers


def test_the_config_of_the_hub_has_the_parameters_that_transformers_builds(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    recipe = recipe_from(_folder(tmp_path / "model"), "data.seq_len=32768")
    units = {unit.name: unit for unit in build_model_shape(recipe).units}
    with torch.device("meta"):
        theirs = Qwen3_5ForConditionalGeneration(Qwen3_5Config(**QWEN3_5_27B))
    _assert_same_numbers_of_parameters(recipe, theirs)
    llm, mixers = recipe.model.llm, [layer.mixer for layer in units["llm"].layers[1:-1]]
    assert (llm.rope_width, llm.rope_sections, llm.rope_interleaved, llm.rope_base) == (64, (11, 11, 10), True, 1e7)
    assert mixers[3] == Attention(heads=24, kv_heads=4, head_dim=256, causal=True, qk_norm=True, output_gate=True)
    assert mixers[2] == GatedDeltaNet(16, 48, 128, 128, 4)
    assert sum(isinstance(mixer, GatedDeltaNet) for mixer in mixers) == 48


def test_a_config_with_experts_has_the_parameters_that_transformers_builds(tmp_path: Path) -> None:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    recipe = recipe_from(_folder_with_experts(tmp_path / "model"), "data.seq_len=32768")
    with torch.device("meta"):
        theirs = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**QWEN3_5_35B))
    _assert_same_numbers_of_parameters(recipe, theirs)
    moe = recipe.model.llm.moe
    assert moe is not None
    assert (moe.experts, moe.top_k, moe.ffn, moe.shared_ffn, moe.shared_gate) == (256, 8, 512, 512, True)
    assert (moe.normalize, moe.dense_blocks) == (True, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob: false is not supported yet; supported: true"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step: 2 is not supported yet; supported: 1"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers: \[3\] is not supported yet"),
        ({"output_router_logits": True}, "output_router_logits: true is not supported yet; supported: false"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size: found 0, allowed: a whole number"),
    ],
)
def test_what_is_not_supported_of_experts_is_said(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(_folder_with_experts(tmp_path / "model", **changes))


def _stack_experts(folder: Path) -> None:
    """Hold the experts of a block in two tensors, as folders of the hub do."""
    weights = load_file(folder / "model.safetensors")
    experts = sorted({name.rsplit(".", 3)[0] for name in weights if ".experts." in name})
    assert experts
    for prefix in experts:
        count = len({name for name in weights if name.startswith(prefix) and name.endswith("down_proj.weight")})
        for stacked, linears in STACKED_LINEARS.items():
            weights[f"{prefix}.{stacked}"] = torch.stack(
                [
                    torch.cat([weights.pop(f"{prefix}.{expert}.{linear}.weight") for linear in linears])
                    for expert in range(count)
                ]
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("model", [qwen3_5_moe, qwen3_5_moe_text])
def test_stacked_experts_are_those_that_lie_apart(model: Callable[[], nn.Module], tmp_path: Path) -> None:
    theirs = model()
    apart, stacked = save(theirs, tmp_path / "apart"), save(theirs, tmp_path / "stacked")
    _stack_experts(stacked)
    pictures = () if model is qwen3_5_moe_text else PICTURES
    recipes = [recipe_from(folder, *pictures) for folder in (apart, stacked)]
    stages = [dict(unit_stage(recipe).named_parameters()) for recipe in recipes]
    assert stages[0].keys() == stages[1].keys()
    assert all(torch.equal(param, stages[1][name]) for name, param in stages[0].items())
    assert content(export_again(stacked, recipes[1])) == content(stacked)
    opened = type(theirs).from_pretrained(stacked).state_dict()
    assert all(torch.equal(tensor, opened[name]) for name, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 64}, "layer_types: linear_attention in all layers is not supported"),
        ({"layer_types": ["sliding_attention"] * 64}, "allowed: full_attention or linear_attention for each of 64"),
        ({"attn_output_gate": False}, "attn_output_gate: false is not supported yet; supported: true"),
        ({"mamba_ssm_dtype": "bfloat16"}, 'mamba_ssm_dtype: "bfloat16" is not supported yet'),
        ({"linear_num_value_heads": 40}, "linear_num_value_heads: found 40, allowed: a multiple of"),
        ({"attention_bias": True}, "attention_bias: true is not supported yet; supported: false"),
        ({"linear_beta_scale": 2.0}, "linear_beta_scale: 2.0 is not supported yet"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(_folder(tmp_path / "model", **changes))


def test_key_heads_limit_context_parallelism(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", linear_num_key_heads=4, num_attention_heads=8, num_key_value_heads=8)
    recipe_from(folder, "data.seq_len=20000", "parallel.llm={cp: 2, tp: 2}")
    with pytest.raises(RecipeError, match=r"parallel.llm.cp: 4 does not divide the 2 key heads .*; allowed: 1, 2 \("):
        recipe_from(folder, "data.seq_len=20000", "parallel.llm={cp: 4, tp: 2}")


def test_key_heads_limit_tensor_parallelism(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", linear_num_key_heads=4, num_key_value_heads=8)
    with pytest.raises(RecipeError, match=r"parallel.llm.tp: 8 does not divide model.llm.delta_net.key_heads 4"):
        recipe_from(folder, "parallel.llm.tp=8")


@pytest.mark.parametrize(
    ("model", "overrides"),
    [(qwen3_5, PICTURES), (qwen3_5_text, ()), (qwen3_5_moe, PICTURES)],
)
def test_blocks_that_predict_further_tokens_are_copied(
    model: Callable[[], nn.Module], overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save(model(), tmp_path / "model", torch.bfloat16)
    weights = load_file(folder / "model.safetensors")
    of_mtp = {"mtp.fc.weight": torch.randn(48, 96).bfloat16(), "mtp.layers.0.mlp.up_proj.weight": torch.randn(96, 48)}
    save_file(weights | of_mtp, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    exported = export_again(folder, recipe_from(folder, *overrides))
    assert content(exported) == content(folder)
    assert of_mtp.keys() <= content(exported).keys()
