"""Folders of Gemma 4: what their configs say, what is refused, and towers that training leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmtrain.costs import num_parameters
from mmtrain.data import build_index
from mmtrain.errors import RecipeError, TooManyBadSamples
from mmtrain.families import FAMILIES
from mmtrain.models.shapes.layer_shape import Attention
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.weights.tiny_model import write_tiny_model
from tests.families.configs import write_config
from tests.models.whole_tensors import stage_logits
from tests.weights.comparison import (
    assert_equal_gradients,
    content,
    export_again,
    full_gradients,
    labels_of,
    unit_stage,
)
from tests.weights.pretrained import VOCAB, gemma4_small, gemma4_text, recipe_from, save
from tests.weights.test_tiny_model import tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# Texts of the smallest and the largest dense size, with the keys of the hub.
TEXT_E2B: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "dtype": "bfloat16",
    "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144, "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None, "num_hidden_layers": 35,
    "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06, "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None, "use_cache": True,
    "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
}  # fmt: skip
TEXT_31B: dict[str, Any] = {
    **TEXT_E2B, "attention_k_eq_v": True, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504, "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 10,
    "num_attention_heads": 32, "num_global_key_value_heads": 4, "num_hidden_layers": 60, "num_key_value_heads": 16,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
}  # fmt: skip
TOWERS: dict[str, Any] = {
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768}, "audio_config": {"model_type": "gemma4_audio"}
}  # fmt: skip


def _config(text: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "image_token_id": 258880,
        "boi_token_id": 255999, "tie_word_embeddings": True, "text_config": {**text, **changes}, **TOWERS,
    }  # fmt: skip


@pytest.mark.parametrize("text", [TEXT_E2B, TEXT_31B], ids=["E2B", "31B"])
def test_a_config_of_the_hub_has_the_parameters_that_transformers_builds(text: dict[str, Any], tmp_path: Path) -> None:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    recipe = recipe_from(write_config(tmp_path / "model", _config(text)), "data.seq_len=8192")
    with torch.device("meta"):
        theirs = Gemma4ForCausalLM(Gemma4TextConfig(**text))
    layers = build_model_shape(recipe).unit("llm").layers
    number = sum(param.numel() for param in theirs.parameters()) + text["num_hidden_layers"]  # layer scalars
    assert sum(map(num_parameters, layers)) == number + text["vocab_size"] * text["hidden_size"], "a tied head counts"


def test_small_sizes_share_keys_and_values_and_large_ones_have_other_heads(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "small", _config(TEXT_E2B)), "data.seq_len=8192")
    blocks = build_model_shape(recipe).unit("llm").layers[1:-1]
    mixers = [block.attention for block in blocks]
    assert [i for i, mixer in enumerate(mixers) if mixer.keeps_kv] == [13, 14]
    assert [i for i, mixer in enumerate(mixers) if mixer.reads_kv] == [*range(15, 35)]
    assert {block.dense_mlp.ffn for block in blocks[15:]} == {12288}
    # Behind block 20 travel inputs of 14 blocks, and keys and values of both kinds of attention.
    assert blocks[20].out_width == 1536 + 14 * 256 + 2 * 256 + 2 * 512
    recipe = recipe_from(write_config(tmp_path / "large", _config(TEXT_31B)), "data.seq_len=8192")
    llm, layers = recipe.model.llm, build_model_shape(recipe).unit("llm").layers
    assert layers[6].mixer == Attention(
        heads=32, kv_heads=4, head_dim=512, causal=True, qk_norm=True, value_norm=True, keys_as_values=True
    )
    assert layers[1].attention.window == 1024
    assert (llm.logit_cap, llm.query_scale, llm.rope_base, llm.window_rope_base) == (30.0, 1.0, 1e6, 1e4)
    assert llm.full_attention is not None
    assert llm.full_attention.rope_width == 128


def test_a_config_that_transformers_wrote_says_the_same(tmp_path: Path) -> None:
    """Heads of single layers take the place of the keys for all layers without a window."""
    for name, model in (("small", gemma4_small()), ("large", gemma4_text())):
        folder = save(model, tmp_path / name)
        written = json.loads((folder / "config.json").read_text())
        stated = {key: value for key, value in written.items() if key != "per_layer_config"}
        kv_heads = {"num_global_key_value_heads": 1} if stated["attention_k_eq_v"] else {}
        other = write_config(tmp_path / f"{name} of the hub", {**stated, "global_head_dim": 32, **kv_heads})
        assert recipe_from(folder).model.llm == recipe_from(other).model.llm


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": True}, "text_config.enable_moe_block: true is not supported yet; supported: false"),
        ({"use_bidirectional_attention": "all"}, 'use_bidirectional_attention: "all" is not supported yet'),
        ({"layer_types": ["full_attention"] * 35}, "layer_types: the kinds of layers are not supported yet"),
        ({"vocab_size_per_layer_input": 1000}, "vocab_size_per_layer_input: 1000 is not supported yet"),
        ({"attention_bias": True}, "attention_bias: true is not supported yet; supported: false"),
        ({"per_layer_config": {"4": {"head_dim": 512}}}, "per_layer_config: layers of one kind with different heads"),
        ({"per_layer_config": {"4": {"window": 512}}}, "per_layer_config.4.window: 512 is not supported yet"),
        ({"laurel_rank": 64}, "laurel_rank: 64 is not supported yet"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_from(write_config(tmp_path / "model", _config(TEXT_E2B, **changes)))


def _with_towers(folder: Path) -> dict[str, Tensor]:
    """Add tensors of towers to a folder, of another type than those of the LLM; return them."""
    of_towers = {
        "model.vision_tower.patch_embedder.input_proj.weight": torch.randn(24, 48).bfloat16(),
        "model.embed_vision.embedding_projection.weight": torch.randn(48, 24).bfloat16(),
        "model.audio_tower.output_proj.bias": torch.randn(24).bfloat16(),
        "model.embed_audio.embedding_projection.weight": torch.randn(48, 24).bfloat16(),
    }
    weights = load_file(folder / "model.safetensors")
    save_file(weights | of_towers, folder / "model.safetensors", metadata={"format": "pt"})
    return of_towers


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compare a packed batch with samples of `transformers`, one by one; export copies tensors of towers."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    text = gemma4_small(pad_token_id=0)
    theirs = Gemma4ForConditionalGeneration(
        Gemma4Config(text_config=text.config, vision_config=None, audio_config=None)
    )
    theirs.model.language_model.load_state_dict(text.model.state_dict())
    theirs.tie_weights()
    folder = save(theirs.eval(), tmp_path / "model")
    of_towers = _with_towers(folder)
    recipe = recipe_from(folder)
    llm = unit_stage(recipe)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(1, VOCAB, (length,), generator=generator) for length in (40, 7, 23)]
    inputs = TextInput(tuple(map(len, ids)), torch.cat(ids), labels_of(ids, -1))
    expected = torch.cat([theirs(input_ids=sample[None]).logits[0] for sample in ids])
    with torch.no_grad():
        assert (stage_logits(llm, None, inputs)[:, :VOCAB] - expected).abs().max() < 1e-4
    loss = llm(None, inputs)
    their_loss = torch.nn.functional.cross_entropy(expected, inputs.labels, reduction="sum")
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(llm))
    exported = export_again(folder, recipe)
    assert content(exported) == content(folder)
    assert of_towers.keys() <= content(exported).keys()


def test_pictures_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["gemma4"], folder, 3, num_train=FEW_CONVERSATIONS)
    rows = [{"messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a"}]}]
    (folder / "conversations" / "heldout.json").write_text(json.dumps([{**rows[0], "images": ["a.png"]}]))
    with pytest.raises(
        TooManyBadSamples, match="it has images or videos, but the recipe's model has no vision encoder"
    ):
        build_index(tiny_recipe(folder))


def test_keys_and_values_of_layers_that_share_them_are_passed_over(tmp_path: Path) -> None:
    """Folders of the hub have them, and `transformers` ignores them too."""
    folder = save(gemma4_small(), tmp_path / "model")
    plain = content(export_again(folder, recipe_from(folder)))
    weights = load_file(folder / "model.safetensors")
    unused = {"model.layers.4.self_attn.k_proj.weight": torch.randn(20, 48)}
    save_file(weights | unused, folder / "model.safetensors", metadata={"format": "pt"})
    stage = unit_stage(recipe_from(folder))
    assert "layers.5.self_attention.k_layernorm.weight" not in dict(stage.named_parameters())
    assert plain.keys() == weights.keys()
