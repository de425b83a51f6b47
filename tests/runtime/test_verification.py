"""What `mmtrain verify` compares: gradients by shard, narrow models, and samples of every kind."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmtrain.costs import num_parameters
from mmtrain.models.model_shape import LayerShape, build_model_shape
from mmtrain.models.named_shards import NamedShard
from mmtrain.models.parameter_specs import ParamSpec
from mmtrain.recipe import load_recipe
from mmtrain.runtime.verification.compare_gradients import compare_gradients
from mmtrain.runtime.verification.shrink_model import shrink_model
from mmtrain.runtime.verification.verify_plan import draw_groups
from tests.flow import cases

RECIPES = Path(__file__).parents[2] / "recipes" / "whatif"
EXPECTED = {
    "vision.first": torch.arange(24.0).reshape(4, 6),
    "llm.middle": torch.linspace(-1, 1, 10),
    "llm.last": torch.ones(6, 2),
}


def _shards() -> list[list[NamedShard]]:
    """Return what two ranks hold: a tensor split by rows, one in two flat parts, and one on the second rank alone."""
    first, middle, last = (torch.clone(x) for x in EXPECTED.values())
    by_rows = ParamSpec("vision.first", (4, 6), 0)
    flat = ParamSpec("llm.middle", (10,), None)
    whole = ParamSpec("llm.last", (6, 2), None)
    return [
        [
            NamedShard("vision.first", by_rows, 0, 2, None, first[:2]),
            NamedShard("llm.middle", flat, 0, 1, (0, 7), middle[:7]),
        ],
        [
            NamedShard("vision.first", by_rows, 1, 2, None, first[2:]),
            NamedShard("llm.middle", flat, 0, 1, (7, 10), middle[7:]),
            NamedShard("llm.last", whole, 0, 1, None, last),
        ],
    ]


def _scaled(shards: list[list[NamedShard]], rank: int, name: str, factor: float) -> None:
    shards[rank] = [replace(s, tensor=s.tensor * factor) if s.name == name else s for s in shards[rank]]


def test_equal_gradients_do_not_differ() -> None:
    shards = _shards()
    _scaled(shards, 1, "llm.last", 1 + 1e-6)
    assert compare_gradients(shards, EXPECTED) == ()


def test_a_wrong_gradient_is_named_with_rank_and_factor_those_nearest_to_the_loss_first() -> None:
    shards = _shards()
    for rank in range(2):
        _scaled(shards, rank, "vision.first", 0.5)
    _scaled(shards, 1, "llm.middle", -1.0)
    middle, first = compare_gradients(shards, EXPECTED)
    assert (middle.parameter, middle.ranks, middle.factor) == ("llm.middle", (1,), None)
    assert (first.parameter, first.ranks) == ("vision.first", (0, 1))
    assert first.factor == pytest.approx(0.5)
    assert str(first) == "vision.first: its gradient on ranks 0, 1 is 0.5 times that of one process"


def test_missing_unknown_and_infinite_gradients_differ() -> None:
    shards = _shards()
    lost = shards[1].pop(1)
    shards[0].append(replace(lost, name="llm.unknown"))
    _scaled(shards, 1, "llm.last", float("nan"))
    last, middle, unknown = compare_gradients(shards, EXPECTED)
    assert (last.parameter, last.ranks) == ("llm.last", (1,))
    assert (middle.parameter, middle.ranks) == ("llm.middle", ())
    assert (unknown.parameter, unknown.ranks) == ("llm.unknown", (0,))


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", ["qwen2_vl_7b", "orchmllm_10b", "internvl_26b", "optimus_dual_encoder"])
def test_large_models_shrink_and_keep_what_a_plan_divides(name: str, tp: int) -> None:
    recipe = load_recipe(RECIPES / f"{name}.yaml").recipe
    model = shrink_model(recipe.model, dict.fromkeys([*recipe.model.all_encoders, "llm"], tp))
    was, now = (build_model_shape(r) for r in (recipe, recipe.model_copy(update={"model": model})))
    for unit in was.units:
        layers = now.unit(unit.name).layers
        assert [_divided(layer) for layer in layers] == [_divided(layer) for layer in unit.layers]
        assert all(layer.ffn % tp == 0 and layer.vocab % tp == 0 for layer in layers)
        assert sum(num_parameters(x) for x in layers) < 1e-2 * sum(num_parameters(x) for x in unit.layers)


def _divided(layer: LayerShape) -> tuple[object, ...]:
    return layer.kind, layer.heads, layer.kv_heads, layer.joins, layer.window, layer.trainable


def test_every_kind_of_sample_is_drawn() -> None:
    lengths = cases.lengths(("vision", "audio"))
    groups = draw_groups(lengths, 40, 0)
    assert {len(group) for group in groups} == {1, 2}
    drawn = np.unique(np.concatenate(groups))
    for items in lengths.items.values():
        counts = np.diff(items.first)[drawn]
        assert {0, 1} <= set(counts.tolist())
        assert counts.max() > 1
