"""A model that starts from a folder computes what `transformers` computes with it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageSpec
from mmtrain.weights import FolderTensors
from tests.models.whole_tensors import join_tp_shards, stage_logits
from tests.weights.comparison import assert_equal_gradients, full_gradients, pretrained_of, unit_stage
from tests.weights.pretrained import (
    VOCAB,
    gemma3_text,
    gemma4_small,
    gemma4_text,
    glm4_moe,
    llama,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    recipe_from,
    save,
    specs_of,
)

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
OTHER_RAMP = {"beta_fast": 4.0, "beta_slow": 0.25, "attention_factor": 1.5}
WINDOWED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
OTHER_GLM: dict[str, Any] = {
    "partial_rotary_factor": 1.0, "attention_bias": False, "use_qk_norm": False, "norm_topk_prob": False,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
OTHER_GEMMA_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": qwen2,
    "qwen2 untied": lambda: qwen2(tie_word_embeddings=False, num_key_value_heads=3),
    "llama 3.1": llama,
    "llama linear": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "qwen2 dynamic": lambda: qwen2(rope_parameters=DYNAMIC, max_position_embeddings=90),
    "qwen2 yarn": lambda: qwen2(rope_parameters=YARN),
    "qwen2 yarn, other ramp": lambda: qwen2(rope_parameters=YARN | OTHER_RAMP),
    "gemma3_text": gemma3_text,
    "gemma3_text stretched": lambda: gemma3_text(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "gemma4_text": gemma4_text,
    "gemma4_text, other values": lambda: gemma4_text(
        attention_k_eq_v=False, rope_parameters=OTHER_GEMMA_ROPE, final_logit_softcapping=None
    ),
    "gemma4_text, smaller sizes": gemma4_small,
    "mistral": mistral,
    "mistral, windows": lambda: mistral(window=16),
    "qwen2 windows": lambda: qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": qwen3,
    "qwen3 windows": lambda: qwen3(use_sliding_window=True, sliding_window=16, layer_types=WINDOWED),
    "qwen3 tied": lambda: qwen3(tie_word_embeddings=True, num_key_value_heads=4),
    "mixtral": mixtral,
    "mixtral, windows": lambda: mixtral(sliding_window=16),
    "qwen2_moe": qwen2_moe,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_5_text, all features turn": lambda: qwen3_5_text(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        num_key_value_heads=4,
        linear_num_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "glm4_moe": glm4_moe,
    "glm4_moe, all features turn": lambda: glm4_moe(**OTHER_GLM),
    "qwen3_moe": qwen3_moe,
    "qwen3_moe, weights as they are": lambda: qwen3_moe(norm_topk_prob=False, mlp_only_layers=[]),
    "qwen3_moe, windows": lambda: qwen3_moe(use_sliding_window=True, sliding_window=16, max_window_layers=2),
    "qwen3_moe, every second block": lambda: qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[1]),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = MODELS[name]()
    folder = save(theirs, tmp_path / "model")
    ours = unit_stage(recipe_from(folder))
    ids = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(3))
    labels = torch.cat([ids[1:], torch.tensor([-100])])
    expected = theirs(input_ids=ids[None], labels=ids[None])
    inputs = TextInput((90,), ids, labels)
    with torch.no_grad():
        logits = stage_logits(ours, None, inputs)[:, :VOCAB]
    assert (logits - expected.logits[0]).abs().max() < 1e-4
    assert expected.logits.std() > 0.1  # else the comparison would prove nothing

    loss = ours(None, inputs) / 89
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    loss.backward()
    expected.loss.backward()
    assert_equal_gradients(folder, theirs, full_gradients(ours))


@pytest.mark.parametrize("tp", [2, 4])
def test_every_rank_reads_its_slice_only(tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split qkv inside a KV head and the vocabulary inside its padding; read in pieces of a few rows."""
    folder = save(qwen2(), tmp_path / "model")
    recipe = recipe_from(folder)
    stage = unit_stage(recipe)
    monkeypatch.setattr("mmtrain.weights.import_weights.MAX_ELEMENTS_PER_READ", 200)
    weights = pretrained_of(recipe)
    num_read = 0
    read = FolderTensors.read

    def count(tensors: FolderTensors, name: str, box: tuple[tuple[int, int], ...]) -> Tensor:
        nonlocal num_read
        part = read(tensors, name, box)
        num_read += part.numel()
        return part

    monkeypatch.setattr(FolderTensors, "read", count)
    params = {f"llm.{name}": param for name, param in stage.named_parameters()}
    for name, spec in specs_of(stage).items():
        shards = [torch.full(spec.local_shape(tp), float("nan")) for _ in range(tp)]
        num_read = 0
        for rank, shard in enumerate(shards):
            assert weights.fill(shard, spec, rank, tp)
        assert torch.equal(join_tp_shards(shards, spec), params[name].view(spec.full_shape)), name
        assert num_read <= params[name].numel() * (tp if spec.dim is None else 1)
    padding = params["llm.layers.0.table.weight"][VOCAB:]
    assert len(padding) == 3
    assert not padding.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sharded_folders_of_any_dtype_are_read_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = qwen2()
    folder = save(theirs, tmp_path / "model", dtype, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    stage = unit_stage(recipe_from(folder))
    table = dict(stage.named_parameters())["layers.0.table.weight"]
    assert torch.equal(table[:VOCAB], theirs.state_dict()["model.embed_tokens.weight"].float())


def test_units_that_the_folder_lacks_start_as_without_it(tmp_path: Path) -> None:
    vision = "model.vision={layers: 1, hidden: 16, heads: 2, ffn: 24, max_side: 4}"
    image = "data.image={min_pixels: 196, max_pixels: 196}"
    recipe = recipe_from(save(qwen2(), tmp_path / "model"), vision, image)
    model, groups = build_model_shape(recipe), ParallelGroups.single()
    weights = pretrained_of(recipe)
    assert weights.units == ("llm",)
    spec = StageSpec("vision", (0, 3))
    options = StageOptions(torch.float32, torch.device("cpu"), 1, "sdpa")
    stages = [
        build_stage(recipe.model, model, spec, groups, replace(options, pretrained=source))
        for source in (None, weights)
    ]
    for ours, expected in zip(*(stage.parameters() for stage in stages), strict=True):
        assert torch.equal(ours, expected)


def test_dynamic_scaling_is_refused_for_samples_in_which_it_would_begin(tmp_path: Path) -> None:
    """Within the context of pretraining it does nothing, as in InternVL3."""
    folder = save(qwen2(rope_parameters=DYNAMIC, max_position_embeddings=50), tmp_path / "model")
    with pytest.raises(RecipeError, match=r"data.seq_len: 64 is above 50, the context that model.llm.rope_scaling"):
        recipe_from(folder)
    assert recipe_from(folder, "data.max_sample_tokens=50").model.llm.rope_scaling is not None


def test_every_family_is_compared_with_transformers() -> None:
    of_their_own = {
        "gemma3",
        "gemma4",
        "glm4v_moe",
        "internvl",
        "llava",
        "mistral3",
        "qwen2_audio",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen2_5_omni",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_omni_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
        "llava_next",
        "llava_onevision",
    }  # test files
    assert set(FAMILIES) <= {name.split()[0] for name in MODELS} | of_their_own
