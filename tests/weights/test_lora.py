"""Adapters against `peft`: the same logits, merged and as an adapter, and the same gradients."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mmtrain.errors import ModelFolderError
from mmtrain.models.optim.parameter_specs import WeightSource
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings
from mmtrain.weights import AdaptedWeights, open_adapted
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.models.factory import randomize, text
from tests.models.whole_tensors import stage_logits
from tests.runtime.models import run_folder
from tests.weights.comparison import stage_from, unit_stage
from tests.weights.pretrained import (
    VOCAB,
    gemma4_small,
    glm4_moe,
    llama,
    llava,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_vl_moe,
    recipe_from,
    save,
    specs_of,
)

__all__ = ["run_mmtrain"]

# `peft` asks a model of transformers for a property that was renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LENGTHS = (9, 5)
EVERY_LINEAR = ("llm.*.linear_*",)
MODELS = {
    "qwen2, with biases": qwen2,
    "llama, four blocks": llama,
    "qwen3_moe": qwen3_moe,
    "gemma4, small": gemma4_small,
}
MIXTURES = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "glm4_moe": glm4_moe}
CASES = [(name, EVERY_LINEAR) for name in MODELS] + [
    pytest.param("qwen3_moe", (pattern,), marks=pytest.mark.slow)
    for pattern in ("llm.*.experts.*.linear_fc1", "llm.*.experts.*.linear_fc2")
]
CASES += [("gemma4, small", ("llm.*.linear_[qkv]", "llm.*.linear_fc1_up"))]
CASES += [pytest.param(name, EVERY_LINEAR, marks=pytest.mark.slow) for name in MIXTURES]


def adapted(folder: Path, targets: tuple[str, ...] = EVERY_LINEAR, **more: Any) -> Recipe:
    """Return a recipe that puts adapters on the model in the folder."""
    pictures = ("data.image.min_pixels=16", "data.image.max_pixels=576")  # of models whose folder allows larger ones
    return with_train(recipe_from(folder, *pictures), lora=LoraSettings(rank=4, alpha=12, targets=targets, **more))


def with_train(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other settings of `train`."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def taught(recipe: Recipe, unit: str = "llm") -> StageModule:
    """Return a pretrained unit with adapters that have an effect."""
    stage = unit_stage(recipe, unit)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in stage.named_parameters():
            if name.endswith(".lora.b"):
                param.normal_(std=0.1, generator=generator)
    return stage


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        rows = [model(input_ids=part[None]).logits[0] for part in ids.split(LENGTHS)]
    return torch.cat(rows)


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_merged_and_as_an_adapter_of_peft_the_logits_are_ours(
    name: str, targets: tuple[str, ...], tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = save((MODELS | MIXTURES)[name](), tmp_path / "model")
    dropout = 0.05 if name in ("qwen2, with biases", "gemma4, small") else 0.0  # which has no effect here
    recipe = adapted(folder, targets, dropout=dropout)
    stage = taught(recipe)
    run = run_folder(tmp_path / "run", recipe, {"llm": stage})
    assert run_mmtrain("export", str(run), "--out", str(tmp_path / "merged")).returncode == 0
    result = run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    assert "--lora-modules" in result.stdout
    inputs = text(*LENGTHS, vocab=VOCAB)
    with torch.no_grad():
        ours = stage_logits(stage, None, inputs)[:, : recipe.model.llm.vocab]
    base = AutoModelForCausalLM.from_pretrained(folder)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged, inputs.ids), ours, rtol=0, atol=1e-4)
    assert float((logits_of(base, inputs.ids) - ours).abs().max()) > 0.1
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert theirs.peft_config["default"].lora_dropout == dropout
    torch.testing.assert_close(logits_of(theirs, inputs.ids), ours, rtol=0, atol=1e-4)


def started(recipe: Recipe, adapter: Path) -> tuple[StageModule, AdaptedWeights]:
    """Return the LLM of a recipe, started from the folder of its model and an adapter."""
    weights = open_adapted(with_train(recipe, init_from=adapter))
    return stage_from(recipe, weights), weights


def assert_equal_on_two_ranks(stage: StageModule, weights: WeightSource) -> None:
    """Assert that two ranks of a tensor-parallel group start with the shards of what one starts with."""
    parameters = dict(zip(specs_of(stage).values(), stage.parameters(), strict=True))
    split = {spec: values for spec, values in parameters.items() if spec.dim is not None}
    assert split
    for spec, values in split.items():
        shards = [torch.empty(spec.local_shape(2)) for _ in range(2)]
        for rank, shard in enumerate(shards):
            assert weights.fill(shard, spec, rank, 2)
        assert spec.dim is not None
        assert torch.equal(torch.cat(shards, spec.dim).view_as(values), values), spec.name


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("qwen2, with biases", marks=pytest.mark.slow)])
def test_an_exported_adapter_goes_on_in_another_run(name: str, tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    folder = save((MODELS | MIXTURES)[name](), tmp_path / "model")
    recipe = adapted(folder)
    first = taught(recipe)
    run = run_folder(tmp_path / "run", recipe, {"llm": first})
    run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    second, weights = started(recipe, tmp_path / "adapter")
    assert weights.num_merged == 0
    assert weights.num_continued > 0
    for (parameter, before), after in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(before, after), parameter
    assert_equal_on_two_ranks(second, weights)
    # Where the run has no adapters, or others, the model is the same, too.
    inputs = text(*LENGTHS, vocab=VOCAB)
    merged, weights = started(recipe_from(folder), tmp_path / "adapter")
    assert weights.num_continued == 0
    assert_equal_on_two_ranks(merged, weights)
    with torch.no_grad():
        ours, theirs = (stage_logits(stage, None, inputs) for stage in (merged, first))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_an_adapter_is_exported_only_for_the_weights_that_it_was_trained_on(
    tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    folder = save(qwen3_moe(), tmp_path / "model")
    recipe = adapted(folder)
    run = run_folder(tmp_path / "run", recipe, {"llm": taught(recipe)})
    run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    other_rank = with_train(recipe, lora=LoraSettings(rank=5))
    for name, continued in (("goes on", recipe), ("merged", other_rank)):
        stage, _ = started(continued, tmp_path / "adapter")
        started_recipe = with_train(continued, init_from=tmp_path / "adapter")
        run = run_folder(tmp_path / name, started_recipe, {"llm": stage})
        result = run_mmtrain("export", str(run), "--out", str(tmp_path / f"{name} again"), "--adapter")
        assert result.returncode == (0 if continued is recipe else 2)
    assert "linear_qkv.weight is not that of" in result.stderr


@pytest.mark.parametrize("name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.slow) for name in MIXTURES)])
def test_an_adapter_of_peft_starts_a_run(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = save((MODELS | MIXTURES)[name](), tmp_path / "model")
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    )  # fmt: skip
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter, value in theirs.named_parameters():
            if "lora_B" in parameter:
                value.normal_(std=0.1, generator=generator)
    theirs.save_pretrained(tmp_path / "adapter")
    recipe = adapted(folder)
    stage, weights = started(recipe, tmp_path / "adapter")
    assert weights.num_merged == recipe.model.llm.layers  # queries and values have an A each
    assert weights.num_continued > recipe.model.llm.layers
    inputs = text(*LENGTHS, vocab=VOCAB)
    with torch.no_grad():
        ours = stage_logits(stage, None, inputs)[:, : recipe.model.llm.vocab]
    expected = logits_of(theirs, inputs.ids)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)
    with theirs.disable_adapter():
        assert float((logits_of(theirs, inputs.ids) - expected).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, r"use_dora: found True, allowed: False"),
        ({"r": 3}, r"q_proj.*found \[4, 48\] and \[48, 4\], expected A and B of \[3, 48\] and \[48, 3\]"),
        ("q_prow", r"model\.layers\.0\.self_attn\.q_prow: no linear of this model \(the nearest name is .*q_proj\)"),
    ],
)
def test_an_adapter_that_is_not_read_is_an_error(change: Any, message: str, tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    module = change if isinstance(change, str) else "q_proj"
    prefix = f"base_model.model.model.layers.0.self_attn.{module}"
    halves = {f"{prefix}.lora_A.weight": torch.zeros(4, 48), f"{prefix}.lora_B.weight": torch.zeros(48, 4)}
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | ({} if isinstance(change, str) else change)
    (tmp_path / "adapter").mkdir()
    save_file(halves, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelFolderError, match=message):
        started(recipe_from(folder), tmp_path / "adapter")


def test_gradients_of_adapters_equal_those_of_peft(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = save(llama(num_hidden_layers=2), tmp_path / "model")
    recipe = adapted(folder)
    stage = taught(recipe)
    run = run_folder(tmp_path / "run", recipe, {"llm": stage})
    run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    inputs = text(*LENGTHS, vocab=VOCAB)
    stage(None, inputs).backward()
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter", is_trainable=True
    )
    for ids, labels in zip(inputs.ids.split(LENGTHS), inputs.labels.split(LENGTHS), strict=True):
        logits = theirs(input_ids=ids[None]).logits[0]
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    their_grads = {
        name.replace(".default", ""): param.grad for name, param in theirs.named_parameters() if param.requires_grad
    }
    ours = dict(stage.named_parameters())
    assert len(their_grads) == 2 * 2 * 7
    for i in range(2):
        attention, mlp = (f"base_model.model.model.layers.{i}.{part}" for part in ("self_attn", "mlp"))
        prefix = f"layers.{i + 1}"

        def grads(module: str, *names: str) -> list[tuple[Tensor, Tensor]]:
            return [
                (their_grads[f"{module}.{name}.lora_A.weight"], their_grads[f"{module}.{name}.lora_B.weight"])
                for name in names
            ]

        projections = grads(attention, "q_proj", "k_proj", "v_proj")
        q, k, v = (b.unflatten(0, (2, -1)) for _, b in projections)  # two KV heads
        grouped = torch.cat([q, k, v], dim=1).flatten(0, 1)
        gate, up = grads(mlp, "gate_proj", "up_proj")
        expected = {
            # One A for query, key and value has the sum of the gradients of three.
            f"{prefix}.self_attention.linear_qkv": (sum(a for a, _ in projections), grouped),
            f"{prefix}.self_attention.linear_proj": grads(attention, "o_proj")[0],
            f"{prefix}.mlp.linear_fc1": (gate[0] + up[0], torch.cat([gate[1], up[1]])),
            f"{prefix}.mlp.linear_fc2": grads(mlp, "down_proj")[0],
        }
        for linear, halves in expected.items():
            for half, gradient in zip("ab", halves, strict=True):
                grad = ours[f"{linear}.lora.{half}"].grad
                torch.testing.assert_close(grad, gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))


@pytest.mark.parametrize(
    ("name", "targets", "num_changed"),
    [
        ("llava", ("*",), 2 * 6 + 2 + 2 * 7),  # of two blocks of CLIP, the projector, two blocks of Llama
        pytest.param("qwen3_vl_moe", EVERY_LINEAR, 2 * 6 + 7, marks=pytest.mark.slow),  # one of three blocks is dense
        pytest.param("qwen3_5", EVERY_LINEAR, 3 * 8 + 7, marks=pytest.mark.slow),  # one of four blocks has attention
        pytest.param("qwen3_5_moe", EVERY_LINEAR, 3 * 10 + 9, marks=pytest.mark.slow),
    ],
)
def test_adapters_on_encoder_projector_and_llm_are_merged_by_peft_as_by_export(
    name: str, targets: tuple[str, ...], num_changed: int, tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    models = {"llava": llava, "qwen3_5": qwen3_5, "qwen3_5_moe": qwen3_5_moe, "qwen3_vl_moe": qwen3_vl_moe}
    folder = save(models[name](), tmp_path / "model")
    recipe = adapted(folder, targets)
    run = run_folder(tmp_path / "run", recipe, {unit: taught(recipe, unit) for unit in ("vision", "llm")})
    merged = run_mmtrain("export", str(run), "--out", str(tmp_path / "merged"))
    assert f"python -m lmms_eval --model vllm --model_args model={tmp_path / 'merged'}" in merged.stdout
    run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    base = AutoModelForImageTextToText.from_pretrained(folder)
    before = {name: param.clone() for name, param in base.named_parameters()}
    theirs = dict(PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().named_parameters())
    merged = dict(AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").named_parameters())
    changed = {name for name, param in merged.items() if not torch.equal(param, before[name])}
    assert len(changed) == num_changed
    for name, param in merged.items():
        torch.testing.assert_close(param, theirs[name], rtol=0, atol=1e-5)


def test_some_linears_of_some_blocks(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    folder = save(qwen2(), tmp_path / "model")
    recipe = adapted(folder, ("llm.layers.2.*.linear_fc1", "llm.layers.1.*.linear_proj"))
    run = run_folder(tmp_path / "run", recipe, {"llm": taught(recipe)})
    run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert config["target_modules"] == [
        "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("no adapters", "--adapter: this run has no adapters"),
        ("also a norm", "also_train trained weights of llm.layers.3, which an adapter's folder does not hold"),
    ],
)
def test_a_run_that_an_adapter_cannot_hold_is_refused(
    change: str, message: str, tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    folder = save(qwen2(), tmp_path / "model")
    recipe = recipe_from(folder) if change == "no adapters" else adapted(folder, also_train=("llm.*.norm.weight",))
    stage = unit_stage(recipe)
    randomize(stage)
    run = run_folder(tmp_path / "run", recipe, {"llm": stage})
    result = run_mmtrain("export", str(run), "--out", str(tmp_path / "adapter"), "--adapter")
    assert result.returncode == 2
    assert message in result.stderr
    assert not (tmp_path / "adapter").exists()
