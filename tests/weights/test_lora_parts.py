"""Adapters on query, key and value apart, and on gate and up: gradients, exports and starts against `peft`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmtrain.checkpoint import open_newest_good
from mmtrain.errors import RecipeError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import RunWeights, open_adapted
from tests.cli.conftest import RunMmtrain, run_mmtrain
from tests.models.factory import text
from tests.models.whole_tensors import stage_logits
from tests.runtime.models import run_folder
from tests.weights.comparison import stage_from, unit_stage
from tests.weights.pretrained import VOCAB, llama, qwen2, qwen3_5, recipe_from, save, specs_of
from tests.weights.test_lora import LENGTHS, assert_equal_on_two_ranks, logits_of, taught, with_train

__all__ = ["run_mmtrain"]

# `peft` asks a model of transformers for a property that was renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

ALL = ("llm.*.linear_[qkv]", "llm.*.linear_proj", "llm.*.linear_fc1_*", "llm.*.linear_fc2")
QUERY_AND_VALUE = ("llm.*.linear_q", "llm.*.linear_v", "llm.*.linear_fc1_up")
JOINT = ("llm.*.linear_*",)
ALL_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {ALL: ALL_MODULES, QUERY_AND_VALUE: ["q_proj", "v_proj", "up_proj"]}
MODELS: dict[str, Callable[[], nn.Module]] = {"qwen2": qwen2, "llama": partial(llama, num_hidden_layers=2)}


def adapted(folder: Path, targets: tuple[str, ...], **more: Any) -> Recipe:
    """Return a recipe with adapters of rank 4 on the model in the folder."""
    pictures = ("data.image.min_pixels=16", "data.image.max_pixels=576")  # of models whose folder allows larger ones
    recipe = recipe_from(folder, *pictures)
    return with_train(recipe, lora=LoraSettings(rank=4, alpha=12, targets=targets, **more))


def trained_by_peft(folder: Path, modules: list[str], out: Path, **config: Any) -> Any:
    """Return a model of `peft` whose adapters have an effect; they are saved to `out`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=modules, **config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_" in name:
                param.normal_(std=0.1, generator=generator)
    model.save_pretrained(out)
    return model


def loss_of(model: nn.Module, inputs: Any) -> Tensor:
    """Return the sum of the losses of all tokens, sample by sample."""
    losses = []
    for ids, labels in zip(inputs.ids.split(LENGTHS), inputs.labels.split(LENGTHS), strict=True):
        logits = model(input_ids=ids[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
    return torch.stack(losses).sum()


def gradients_of_peft(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by the names that an exported adapter gives them."""
    return {
        name.replace(".default", ""): param.grad
        for name, param in model.named_parameters()
        if "lora_" in name and param.grad is not None
    }


def as_peft(values: dict[str, Tensor], targets: tuple[str, ...], heads: tuple[int, int]) -> dict[str, Tensor]:
    """Return adapters on the LLM's blocks, (parts * rank, inputs) and full views of B, by the names of `peft`.

    heads: KV heads, and rows of queries of each. This is the layout written out, not that of the code under test.
    """
    kv_heads, query_rows = heads
    named: dict[str, Tensor] = {}
    apart = {"self_attention.linear_qkv": ("q", "k", "v"), "mlp.linear_fc1": ("gate", "up")}
    module_of = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
    for name, a in values.items():
        if not name.endswith(".lora.a"):
            continue
        _, _, block, linear = name.removesuffix(".lora.a").split(".", 3)
        prefix, b = f"base_model.model.model.layers.{int(block) - 1}", values[name.replace(".lora.a", ".lora.b")]
        if linear in module_of:
            named[f"{prefix}.{module_of[linear]}.lora_A.weight"] = a
            named[f"{prefix}.{module_of[linear]}.lora_B.weight"] = b
            continue
        if linear == "mlp.linear_fc1":
            rows = dict(zip(apart[linear], b, strict=True))
            home = "mlp"
        else:
            groups = b.view(kv_heads, -1, b.shape[1])
            width = (groups.shape[1] - query_rows) // 2
            split = torch.split(groups, [query_rows, width, width], dim=1)
            rows = {part: of_part.flatten(0, 1) for part, of_part in zip(apart[linear], split, strict=True)}
            home = "self_attn"
        present = [part for part in apart[linear] if f"{part}_proj" in TARGETS[targets]]
        for part, of_part in zip(present, torch.split(a, 4), strict=True):
            named[f"{prefix}.{home}.{part}_proj.lora_A.weight"] = of_part
            named[f"{prefix}.{home}.{part}_proj.lora_B.weight"] = rows[part]
    return named


def heads_of(recipe: Recipe) -> tuple[int, int]:
    llm = recipe.model.llm
    kv_heads = llm.kv_heads or llm.heads
    return kv_heads, llm.heads // kv_heads * (llm.head_dim or llm.hidden // llm.heads)


@pytest.mark.parametrize("targets", TARGETS, ids=["all", "some parts"])
@pytest.mark.parametrize("name", MODELS)
def test_an_adapter_of_peft_goes_on_with_its_loss_and_gradients(
    name: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save(MODELS[name](), tmp_path / "model")
    theirs = trained_by_peft(folder, TARGETS[targets], tmp_path / "adapter")
    recipe = adapted(folder, targets)
    weights = open_adapted(with_train(recipe, init_from=tmp_path / "adapter"))
    assert weights.num_merged == 0
    stage = stage_from(recipe, weights)
    assert_equal_on_two_ranks(stage, weights)
    inputs = text(*LENGTHS, vocab=VOCAB)
    assert inputs.ids is not None
    loss, expected = stage(None, inputs), loss_of(theirs, inputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    torch.autograd.backward(expected)
    gradients = {
        spec.name: param.grad.view(spec.full_shape)
        for spec, param in zip(specs_of(stage).values(), stage.parameters(), strict=True)
        if param.grad is not None
    }
    ours = as_peft(gradients, targets, heads_of(recipe))
    of_peft = gradients_of_peft(theirs)
    assert ours.keys() == of_peft.keys()
    for parameter, gradient in of_peft.items():
        assert gradient.abs().max() > 1e-4, parameter
        torch.testing.assert_close(ours[parameter], gradient, rtol=1e-4, atol=1e-5, msg=parameter)


@pytest.mark.parametrize("targets", TARGETS, ids=["all", "some parts"])
def test_merged_and_exported_the_adapters_are_ours(
    targets: tuple[str, ...], tmp_path: Path, run_mmtrain: RunMmtrain
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = save(qwen2(), tmp_path / "model")
    recipe = adapted(folder, targets, scaling="rslora")
    stage = taught(recipe)
    run = run_folder(tmp_path / "run", recipe, {"llm": stage})
    for options in (("merged",), ("adapter", "--adapter")):
        done = run_mmtrain("export", run, "--out", tmp_path / options[0], *options[1:])
        assert done.returncode == 0, done.stderr
    inputs = text(*LENGTHS, vocab=VOCAB)
    assert inputs.ids is not None
    with torch.no_grad():
        ours = stage_logits(stage, None, inputs)[:, : recipe.model.llm.vocab]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged, inputs.ids), ours, rtol=0, atol=1e-4)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(theirs, inputs.ids), ours, rtol=0, atol=1e-4)
    with theirs.disable_adapter():
        assert float((logits_of(theirs, inputs.ids) - ours).abs().max()) > 0.1
    names = {name.split(".")[-3] for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    assert names == set(TARGETS[targets])

    again = open_adapted(with_train(recipe, init_from=tmp_path / "adapter"))
    assert again.num_merged == 0
    started = dict(stage_from(recipe, again).named_parameters())
    held = targets == QUERY_AND_VALUE
    for parameter, param in stage.named_parameters():
        before = param.detach()
        if held and parameter.endswith("lora.b"):  # rows of parts without an adapter are not written
            before = before * (started[parameter] != 0)
        assert torch.equal(started[parameter], before), parameter


@pytest.mark.parametrize(
    ("config", "lora", "num_merged"),
    [
        ({}, {"targets": JOINT}, 2 * 2),  # query, key and value, gate and up have an A each there
        ({}, {"targets": ALL}, 0),
        ({"use_rslora": True}, {"targets": ALL, "scaling": "rslora"}, 0),
        ({"use_rslora": True}, {"targets": ALL}, 2 * 4),  # another scale
    ],
    ids=["one A here", "apart", "both rslora", "rslora there"],
)
def test_what_goes_on_and_what_is_merged_computes_the_same(
    config: dict[str, Any], lora: dict[str, Any], num_merged: int, tmp_path: Path
) -> None:
    folder = save(MODELS["llama"](), tmp_path / "model")
    theirs = trained_by_peft(folder, ALL_MODULES, tmp_path / "adapter", **config)
    recipe = with_train(recipe_from(folder), lora=LoraSettings(rank=4, alpha=12, **lora))
    weights = open_adapted(with_train(recipe, init_from=tmp_path / "adapter"))
    assert weights.num_merged == num_merged
    inputs = text(*LENGTHS, vocab=VOCAB)
    assert inputs.ids is not None
    with torch.no_grad():
        ours = stage_logits(stage_from(recipe, weights), None, inputs)[:, : recipe.model.llm.vocab]
    torch.testing.assert_close(ours, logits_of(theirs, inputs.ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("own", [ALL, QUERY_AND_VALUE, JOINT, None], ids=["same", "others", "joint", "none"])
def test_a_run_starts_from_one_with_parts_whatever_its_adapters_are(
    own: tuple[str, ...] | None, tmp_path: Path
) -> None:
    folder = save(qwen2(), tmp_path / "model")
    source = adapted(folder, ALL)
    first = taught(source)
    run = run_folder(tmp_path / "run", source, {"llm": first})
    recipe = with_train(source, lora=None) if own is None else adapted(folder, own)
    weights = RunWeights(open_newest_good(run / CHECKPOINTS_FOLDER, print), source, recipe)
    assert weights.differing_names == []
    second = stage_from(recipe, weights)
    inputs = text(*LENGTHS, vocab=VOCAB)
    assert inputs.ids is not None
    with torch.no_grad():
        torch.testing.assert_close(
            stage_logits(second, None, inputs), stage_logits(first, None, inputs), rtol=0, atol=1e-4
        )
    if own in (ALL, None):  # else some adapters are new
        assert_equal_on_two_ranks(second, weights)


def test_a_gated_attention_has_the_gates_with_the_queries(tmp_path: Path, run_mmtrain: RunMmtrain) -> None:
    """Qwen3.5: `q_proj` holds each head's query and its gate; ours has the gates of a KV head behind its queries."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    folder = save(qwen3_5(), tmp_path / "model")
    recipe = adapted(folder, ("llm.*.linear_q", "llm.*.linear_k"))
    stage = taught(recipe)
    run = run_folder(tmp_path / "run", recipe, {"llm": stage})
    done = run_mmtrain("export", run, "--out", tmp_path / "adapter", "--adapter")
    assert done.returncode == 0, done.stderr
    inputs = text(*LENGTHS, vocab=VOCAB)
    assert inputs.ids is not None
    with torch.no_grad():
        ours = stage_logits(stage, None, inputs)[:, : recipe.model.llm.vocab]
    theirs = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits_of(theirs, inputs.ids), ours, rtol=0, atol=1e-4)


def test_a_joint_linear_that_is_named_has_one_adapter_whatever_parts_are(tmp_path: Path) -> None:
    folder = save(qwen2(), tmp_path / "model")
    layer = build_model_shape(adapted(folder, (*JOINT, *ALL))).unit("llm").layers[1]
    assert layer.lora == build_model_shape(adapted(folder, JOINT)).unit("llm").layers[1].lora
    assert layer.lora is not None
    assert layer.lora.parts == ()
    with pytest.raises(RecipeError, match=r"linear_qq.*closest names.*linear_q"):
        build_model_shape(adapted(folder, ("llm.layers.1.self_attention.linear_qq",)))


@pytest.mark.parametrize("targets", TARGETS, ids=["all", "some parts"])
def test_parts_are_counted_as_they_are_built(targets: tuple[str, ...], tmp_path: Path) -> None:
    from mmtrain.costs.layer_arithmetic import num_parameters

    recipe = adapted(save(qwen2(), tmp_path / "model"), targets)
    stage = unit_stage(recipe)
    for index, layer in list(enumerate(build_model_shape(recipe).unit("llm").layers))[1:-1]:
        prefix = f"layers.{index}."
        built = sum(param.numel() for name, param in stage.named_parameters() if name.startswith(prefix))
        assert num_parameters(layer) == built
