"""A run that starts from another: the same weights on any split, adapters that go on or are merged, errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.checkpoint import open_newest_good
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim.parameter_specs import stage_param_specs, tp_shard
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.train_settings import LoraSettings
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.weights import RunWeights
from tests.flow.cases import recipe as tiny_recipe
from tests.models.factory import randomize, text
from tests.models.whole_tensors import stage_logits
from tests.runtime.models import run_folder

LORA = LoraSettings(rank=4, alpha=12, targets=("llm.*.linear_*",))
OTHER_RANK = LoraSettings(rank=2, alpha=12, targets=("llm.*.linear_*",))
ATTENTION_ONLY = LoraSettings(rank=4, alpha=12, targets=("llm.*.linear_qkv",))


def recipe_with(lora: LoraSettings | None, **changes: Any) -> Recipe:
    return tiny_recipe(model__vision=None, train__lora=lora, **changes)


def stage_of(recipe: Recipe, weights: RunWeights | None = None, seed: int = 0) -> StageModule:
    shape = build_model_shape(recipe)
    spec = StageSpec("llm", (0, len(shape.unit("llm").layers)))
    options = StageOptions(torch.float32, torch.device("cpu"), seed, "sdpa", weights)
    return build_stage(recipe.model, shape, spec, ParallelGroups.single(), options)


def start(folder: Path, source: Recipe, recipe: Recipe) -> tuple[StageModule, StageModule, RunWeights]:
    """Save a random model of `source`; return it, the one of `recipe` that starts from it, and what it starts from."""
    saved = stage_of(source)
    randomize(saved)
    run = run_folder(folder / "run", source, {"llm": saved})
    weights = RunWeights(open_newest_good(run / CHECKPOINTS_FOLDER, print), source, recipe)
    return saved, stage_of(recipe, weights, seed=5), weights


def logits(stage: StageModule) -> Tensor:
    with torch.no_grad():
        return stage_logits(stage, None, text(9, 5, vocab=61))


@pytest.mark.parametrize(
    ("source", "own"),
    [
        (None, None), (LORA, LORA), (None, LORA), (LORA, None), (LORA, ATTENTION_ONLY), (LORA, OTHER_RANK),
    ],
    ids=["plain", "adapters go on", "new adapters", "merged", "some go on, some are merged", "merged, new ones"],
)  # fmt: skip
def test_the_model_computes_what_that_of_the_other_run_does(source: Any, own: Any, tmp_path: Path) -> None:
    saved, started, weights = start(tmp_path, recipe_with(source), recipe_with(own))
    assert weights.differing_names == weights.misshaped == []
    torch.testing.assert_close(logits(started), logits(saved), rtol=0, atol=1e-5)
    names = {name for name, _ in saved.named_parameters()}
    if source == own:
        values = dict(saved.named_parameters())
        assert all(torch.equal(param, values[name]) for name, param in started.named_parameters())
    for name, param in started.named_parameters():
        if name.endswith(".lora.b") and (name not in names or own == OTHER_RANK):
            assert not param.any(), "a new adapter has no effect"


@pytest.mark.parametrize("own", [None, LORA], ids=["merged", "adapters go on"])
def test_each_tensor_parallel_rank_starts_with_its_shard(own: Any, tmp_path: Path) -> None:
    _, started, weights = start(tmp_path, recipe_with(LORA), recipe_with(own))
    specs = stage_param_specs(started, "llm", tp=1)
    for name, param in started.named_parameters():
        # What one rank holds says how two split it; a split of one is along the same dimension.
        spec = specs[name]
        for rank in range(2):
            expected = tp_shard(param.detach().view(spec.full_shape), spec, rank, 2)
            shard = torch.full_like(expected, torch.nan)
            assert weights.fill(shard, spec, rank, 2)
            torch.testing.assert_close(shard, expected, rtol=1e-6, atol=1e-7)
            flat = expected.reshape(-1)
            master = torch.full_like(flat[3:-1], torch.nan)
            assert weights.fill_master(master, spec, rank, 2, 3, torch.bfloat16)
            torch.testing.assert_close(master, flat[3:-1], rtol=1e-6, atol=1e-7)
            assert not weights.fill_master(master, spec, rank, 2, 3, torch.float32)


def test_all_parameters_that_differ_are_named(tmp_path: Path) -> None:
    source = recipe_with(None, model__llm__qkv_bias=False, model__llm__ffn=32)
    _, _, weights = start(tmp_path, source, recipe_with(None, model__llm__layers=2))
    biases = [f"llm.layers.{i}.self_attention.linear_qkv.bias: missing there" for i in (1, 2)]
    assert [line for line in weights.differing_names if "bias" in line] == biases
    assert "llm.layers.3.mlp.linear_fc1.weight: not a parameter of this model" in weights.differing_names
    assert weights.misshaped == [
        f"llm.layers.{i}.mlp.{name}"
        for i in (1, 2)
        for name in (
            "linear_fc1.weight: has the shape [2, 32, 24] there, [2, 40, 24] here",
            "linear_fc2.weight: has the shape [24, 32] there, [24, 40] here",
        )
    ]
