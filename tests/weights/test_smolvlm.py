"""Folders of SmolVLM: texts train as its own classes compute them, and the tower stays aside."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmtrain.data import build_index
from mmtrain.data.formats.sample import Sample, Turn
from mmtrain.data.text.load_tokenizer import load_tokenizer
from mmtrain.errors import RecipeError, TooManyBadSamples
from mmtrain.families import FAMILIES
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
from tests.weights.pretrained import VOCAB, recipe_from, save
from tests.weights.test_tiny_model import tiny_recipe
from tests.weights.tiny_folders import FEW_CONVERSATIONS

# Of the hub, with keys of its own trainer.
CONFIG_2B: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "model_type": "smolvlm",
    "scale_factor": 3, "tie_word_embeddings": False, "use_cache": False, "use_reentrant_checkpoints": False,
    "text_config": {
        "_flash_attn_2_enabled": True, "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "neftune_noise_alpha": 0.0, "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32,
        "pad_token_id": 2, "perceiver_config": {"model_type": "vllama3"}, "pixel_shuffle_factor": 3,
        "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_theta": 130000,
        "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
    },
    "vision_config": {"hidden_size": 1152, "image_size": 384, "model_type": "smolvlm_vision", "patch_size": 14},
    "vocab_size": 49280,
}  # fmt: skip

# As the hub has it, with the tiny model's token behind a turn.
TEMPLATE = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}
{%- if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}
{%- for line in message['content'] %}
{%- if line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


def smolvlm() -> nn.Module:
    """Return a small model with random weights."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    tiny = FAMILIES["smolvlm"].tiny["config.json"]
    text = {**tiny["text_config"], "hidden_size": 48, "intermediate_size": 80, "vocab_size": VOCAB}
    torch.manual_seed(2)
    config = SmolVLMConfig(text_config=text, vision_config=tiny["vision_config"], scale_factor=2)
    model: nn.Module = SmolVLMForConditionalGeneration(config).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model


def test_a_config_of_the_hub_is_read(tmp_path: Path) -> None:
    recipe = recipe_from(write_config(tmp_path / "model", CONFIG_2B))
    llm = recipe.model.llm
    assert (llm.layers, llm.hidden, llm.heads, llm.vocab, llm.rope_base) == (24, 2048, 32, 49280, 130000)
    assert not recipe.model.all_encoders


def test_what_a_llama_does_not_compute_is_refused(tmp_path: Path) -> None:
    text = {**CONFIG_2B["text_config"], "qk_layer_norms": True}
    with pytest.raises(RecipeError, match=r"text_config\.qk_layer_norms: true is not supported yet"):
        recipe_from(write_config(tmp_path / "model", {**CONFIG_2B, "text_config": text}))


def test_logits_loss_and_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """Compare a packed batch with samples of `transformers`, one by one; export copies the tower bit for bit."""
    theirs = smolvlm()
    folder = save(theirs, tmp_path / "model")
    recipe = recipe_from(folder)
    llm = unit_stage(recipe)
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(5, VOCAB, (length,), generator=generator) for length in (40, 7, 23)]
    inputs = TextInput(tuple(map(len, ids)), torch.cat(ids), labels_of(ids, -1))
    expected = torch.cat([theirs(input_ids=sample[None]).logits[0] for sample in ids])
    with torch.no_grad():
        assert (stage_logits(llm, None, inputs)[:, :VOCAB] - expected).abs().max() < 1e-4
    loss = llm(None, inputs)
    their_loss = nn.functional.cross_entropy(expected, inputs.labels, reduction="sum")
    assert loss.item() == pytest.approx(their_loss.item(), rel=1e-5)
    loss.backward()
    their_loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(llm))
    exported = content(export_again(folder, recipe))
    assert exported == content(folder)
    assert any(name.startswith("model.vision_model.") for name in exported)
    assert "model.connector.modality_projection.proj.weight" in exported


def test_texts_are_written_as_by_its_template(tmp_path: Path) -> None:
    """An answer begins with a blank, behind the colon with which a prompt ends."""
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["smolvlm"], folder, 3, num_train=FEW_CONVERSATIONS)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    turns = (Turn("user", "What is 2 + 2?"), Turn("assistant", "It is 4."), Turn("user", "Yes"), Turn("assistant", "5"))
    messages = [{"role": turn.role, "content": [{"type": "text", "text": turn.text}]} for turn in turns]
    theirs = AutoTokenizer.from_pretrained(folder)
    encoded = load_tokenizer(folder).encode(Sample("a", "a.json", 0, turns, images=()), {})
    assert encoded.ids.tolist() == theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    targets = [label for label in encoded.labels.tolist() if label >= 0]
    assert theirs.decode(targets).replace(" ", "") == "Itis4.<|im_end|>5<|im_end|>"


def test_pictures_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_model(FAMILIES["smolvlm"], folder, 3, num_train=FEW_CONVERSATIONS)
    rows = [{"messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a"}]}]
    (folder / "conversations" / "heldout.json").write_text(json.dumps([{**rows[0], "images": ["a.png"]}]))
    with pytest.raises(
        TooManyBadSamples, match="it has images or videos, but the recipe's model has no vision encoder"
    ):
        build_index(tiny_recipe(folder))
