"""What `mmtrain verify` compares: gradients by shard, narrow models, and samples of every kind."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmtrain.costs import num_parameters
from mmtrain.errors import UserError
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.layer_shape import Attention
from mmtrain.models.shapes.model_shape import LayerShape, build_model_shape
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import Recv, Send, build_program
from mmtrain.recipe import load_recipe
from mmtrain.report.verification import Difference
from mmtrain.runtime.verification.compare_gradients import compare_gradients, stage_of_parameter
from mmtrain.runtime.verification.fewer_replicas import RankLimit, cut_replicas
from mmtrain.runtime.verification.verify_plan import _limit, draw_groups, shrink_model
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


def test_a_difference_names_the_stage_of_its_parameter() -> None:
    recipe = cases.recipe()
    meshes = {"vision": cases.Mesh((), (0,)), "llm": cases.Mesh((1, 2, 3), (1, 2), vpp=2)}
    graph = stage_graph(cases.plan(recipe, **meshes), build_model_shape(recipe))
    names = ("vision.layers.3.linear_1.weight", "llm.layers.0.table.weight", "llm.layers.2.a", "llm.layers.4.b")
    assert [stage_of_parameter(graph, name) for name in names] == ["vision.0", "llm.0", "llm.2", "llm.3"]
    unknown = ("llm.layers.5.a", "audio.layers.0.a", "llm.layers.x.a", "unknown")
    assert {stage_of_parameter(graph, name) for name in unknown} == {None}
    difference = Difference("llm.layers.2.a", (2,), 0.5, 1.0, "llm.2")
    assert str(difference) == "llm.layers.2.a of stage llm.2: its gradient on rank 2 is 0.5 times that of one process"


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
        assert all((layer.mlp is None or layer.mlp.ffn % tp == 0) and layer.vocab % tp == 0 for layer in layers)
        assert sum(num_parameters(x) for x in layers) < 1e-2 * sum(num_parameters(x) for x in unit.layers)


def _divided(layer: LayerShape) -> tuple[object, ...]:
    mixer = layer.mixer or Attention()
    return layer.kind, mixer.heads, mixer.kv_heads, layer.projector.joins, mixer.window, layer.trainable


def test_every_kind_of_sample_is_drawn() -> None:
    lengths = cases.lengths(("vision", "audio"))
    groups = draw_groups(lengths, 40, 0)
    assert {len(group) for group in groups} == {1, 2}
    drawn = np.unique(np.concatenate(groups))
    for items in lengths.items.values():
        counts = np.diff(items.first)[drawn]
        assert {0, 1} <= set(counts.tolist())
        assert counts.max() > 1


def test_of_many_samples_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtrain.runtime.verification.verify_plan.MAX_CANDIDATES", 5)
    lengths = cases.lengths(("vision", "audio"))
    step = -(-len(lengths) // 5)
    drawn = np.concatenate(draw_groups(lengths, 40, 0))
    assert set(drawn.tolist()) <= set(range(0, len(lengths), step))


HERE = RankLimit(16, "--ranks-here allows 16 processes", "Raise it")
CUTS: dict[str, tuple[int, int, dict[str, cases.Mesh], dict[str, Any]]] = {  # -> most ranks, groups that are left, plan
    "two encoder replicas for each of the llm's": (
        30,
        2,
        {
            "vision": cases.Mesh((2,), tuple(range(16)), dp=8, recompute=(1,)),
            "llm": cases.Mesh((2, 3), tuple(range(16, 48)), tp=4, dp=4, vpp=2, sp=True),
        },
        {},
    ),
    "unified, one group": (
        7,
        1,
        {
            "vision": cases.Mesh((), tuple(range(8)), tp=2, dp=4, bucket_parameters=None),
            "llm": cases.Mesh((2,), tuple(range(16)), tp=2, dp=4, bucket_parameters=None),
        },
        {},
    ),
    "colocated, a group's ranks lie apart": (
        8,
        2,
        {
            "vision": cases.Mesh((), (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15), dp=16),
            "llm": cases.Mesh((2,), tuple(range(16)), tp=2, dp=4),
        },
        {"kind": "coarse"},
    ),
    "an order of its own": (
        2,
        1,
        {
            "vision": cases.Mesh((), (3, 2), dp=2, bucket_parameters=None),
            "llm": cases.Mesh((), (1, 0), dp=2, bucket_parameters=None),
        },
        {
            "kind": "explicit",
            "order": {
                3: tuple(f"{kind} vision.0 vision:0.{i}" for i in range(8) for kind in "FB"),
                1: tuple(f"{kind} llm.0 llm:0.{i}" for i in range(8) for kind in "FB"),
            },
        },
    ),
    "four of sixteen shards, two copies": (
        15,
        8,
        {"vision": cases.Mesh((), tuple(range(16)), dp=16), "llm": cases.Mesh((), tuple(range(16)), dp=16)},
        {"shard": 4},
    ),
    "a plan that may run whole": (2, 2, {unit: cases.Mesh((), (0, 1), dp=2) for unit in ("vision", "llm")}, {}),
}


@pytest.mark.parametrize("case", CUTS)
def test_ranks_of_a_cut_plan_do_what_they_do_in_the_whole_plan(case: str) -> None:
    max_ranks, num_groups, meshes, options = CUTS[case]
    recipe = cases.recipe(train__global_batch=16)
    whole, shape = cases.plan(recipe, **options, **meshes), build_model_shape(recipe)
    cut = cut_replicas(whole, shape, replace(HERE, ranks=max_ranks))
    assert (cut.num_groups, cut.num_planned_ranks) == (num_groups, whole.world_size)
    assert (cut.note is None) == (cut.plan == whole)
    assert cut.plan.world_size <= max_ranks
    programs = []
    for plan in (whole, cut.plan):
        assert Plan.model_validate_json(plan.file_text()) == plan
        programs.append(build_program(stage_graph(plan, shape), None, plan.schedule.kind, plan.schedule.order))
    new_ranks = {}
    for unit, mesh in ((graph_mesh.unit, graph_mesh) for graph_mesh in programs[0].graph.meshes):
        cut_mesh = programs[1].graph.mesh(unit)
        assert cut_mesh.dp * cut.num_planned_groups == mesh.dp * cut.num_groups
        for stage, replica in product(range(mesh.pp), range(cut_mesh.dp)):
            new_ranks |= zip(mesh.tp_group(stage, replica), cut_mesh.tp_group(stage, replica), strict=True)
    assert sorted(new_ranks.values()) == list(range(cut.plan.world_size))
    for rank, new_rank in new_ranks.items():
        renamed = tuple(
            replace(action, peer=new_ranks[action.peer]) if isinstance(action, Send | Recv) else action
            for action in programs[0].for_rank(rank)
        )
        assert programs[1].for_rank(new_rank) == renamed


def test_buckets_of_a_cut_plan_are_as_large_as_those_of_the_whole_plan() -> None:
    """Not as those of so few replicas; a plan of 64 replicas says 64 million by itself."""
    meshes = {unit: cases.Mesh((), tuple(range(64)), dp=64, bucket_parameters=None) for unit in ("vision", "llm")}
    recipe = cases.recipe(train__global_batch=64)
    cut = cut_replicas(cases.plan(recipe, **meshes), build_model_shape(recipe), replace(HERE, ranks=2))
    assert {unit.bucket_parameters for unit in cut.plan.units.values()} == {64_000_000}


def test_a_plan_that_is_cut_says_what_is_left_and_what_is_not_verified() -> None:
    notes = {}
    for case, (max_ranks, _, meshes, options) in CUTS.items():
        recipe = cases.recipe(train__global_batch=16)
        plan = cases.plan(recipe, **options, **meshes)
        notes[case] = cut_replicas(plan, build_model_shape(recipe), replace(HERE, ranks=max_ranks)).note
    assert notes["colocated, a group's ranks lie apart"] == (
        "Cut to 8 of the plan's 16 ranks: 2 of its 4 replica groups, which all run the same program."
    )
    assert notes["unified, one group"] == (
        "Cut to 4 of the plan's 16 ranks: 1 of its 4 replica groups, which all run the same program. What ranks reduce "
        "and gather beyond that is not verified; it takes 8 processes."
    )
    assert notes["four of sixteen shards, two copies"] == (
        "Cut to 8 of the plan's 16 ranks: 2 of its 4 copies of the weights."
    )


def test_gpus_limit_the_ranks_where_there_are_fewer_than_processes_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _limit(8).reason == "--ranks-here allows 8 processes"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (_limit(8).ranks, _limit(8).reason) == (4, "this machine has 4 GPUs")
    assert "--cpu" in _limit(8).remedy
    assert (_limit(3).ranks, _limit(3).reason) == (3, "--ranks-here allows 3 processes")


@pytest.mark.parametrize(
    ("meshes", "options", "smallest"),
    [
        (
            {"vision": cases.Mesh((), tuple(range(9)), dp=9), "llm": cases.Mesh((2,), tuple(range(9, 25)), dp=8)},
            {},
            r"25 ranks, one replica group of it \(vision tp1 pp1 dp9, llm tp1 pp2 dp8\) has 25, and --ranks-here "
            r"allows 16 processes\. .* Raise it, or plan for fewer ranks \(--set cluster.ranks=N\)",
        ),
        (
            {unit: cases.Mesh((), tuple(range(32)), dp=32) for unit in ("vision", "llm")},
            {"shard": 32},
            r"one copy of its weights is sharded over 32 ranks, .* \(--set parallel.shard=N\)",
        ),
    ],
)
def test_a_plan_that_cannot_be_cut_is_refused_with_the_reason(
    meshes: dict[str, cases.Mesh], options: dict[str, Any], smallest: str
) -> None:
    recipe = cases.recipe(train__global_batch=72)
    with pytest.raises(UserError, match=smallest):
        cut_replicas(cases.plan(recipe, **options, **meshes), build_model_shape(recipe), HERE)
