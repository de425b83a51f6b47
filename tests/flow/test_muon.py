"""Muon under any plan trains as in one process, where the singular values of whole matrices are computed."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.checkpoint import open_newest_good
from mmtrain.planning import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from tests.flow.cases import AUDIO, FINE, RESAMPLED, Mesh, plan, recipe
from tests.flow.cells import CELLS, Cell
from tests.flow.equality import assert_equals_one_process
from tests.flow.orders import PIPELINE, TOGETHER
from tests.flow.runs import NUM_STEPS, REPLICATED, kill_and_resume, refuse, request_for, run_all
from tests.flow.test_delta_nets import DELTA
from tests.flow.test_elastic import assert_same_course
from tests.flow.test_mixtures import SHARED, SIX_EXPERTS
from tests.flow.test_replicated import TIED, ZERO_2, replicated
from tests.tiers import mostly_long

MUON: dict[str, Any] = {"train__optimizer__kind": "muon"}
RATES: dict[str, Any] = {
    "model__vision__weight_decay": 0.5,
    "model__llm__lr_scale": 0.5,
    "train__optimizer__layer_lr_decay": 0.5,
    "train__optimizer__clip_norm": 0.05,
}

# name -> (recipe changes, meshes). LLM layers: 0 embedding, 1-3 blocks, 4 head.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "tp2 dp2, rates of layers and units, clipped": (
        RATES,
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2, 3, 4, 5), tp=2, dp=2)},
    ),
    "disaggregated 1:1": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1,))}),
    "unified, vision dp3, llm pp2 vpp2, tied": (
        TIED | {"train__global_batch": 6},
        {"vision": Mesh((), (0, 1, 2), dp=3), "llm": Mesh((1, 2, 3), (0, 1), vpp=2)},
    ),
    "tp4 with two kv heads, vision tp2 with slices of tokens": (
        {},
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((), (2, 3, 4, 5), tp=4, sp=True)},
    ),
    "replicas that share sequences": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2, split="even")}),
    "parts frozen, audio": (
        {"model__audio": AUDIO, "train__freeze": ("*linear_qkv.weight", "llm.layers.2.*", "vision.layers.1.mlp.*")},
        {"vision": Mesh((), (0,)), "audio": Mesh((2,), (1, 2)), "llm": Mesh((), (3, 4, 5, 6), tp=2, dp=2)},
    ),
    "a resampler and gated MLPs, dp2": (
        {"model__encoders": {"resampled": RESAMPLED}, "model__vision__gated_mlp": True},
        {"vision": Mesh((), (0, 1), dp=2), "resampled": Mesh((), (2, 3), tp=2), "llm": Mesh((), (4,))},
    ),
    "experts, ep2 of dp4, tp2": (
        SIX_EXPERTS,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), tuple(range(8)), tp=2, dp=4, ep=2)},
    ),
    "experts, shared expert, router with losses": (SHARED, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2)}),
    "gated delta nets and gated attention, tp2": (
        DELTA,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((2,), (2, 3, 4, 5), tp=2)},
    ),
}
ORDERED: dict[str, tuple[dict[str, Any], dict[str, Mesh], dict[int, Any]]] = {
    "in parts, tp2": (
        {},
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((), (0, 1), tp=2)},
        {0: TOGETHER, 1: TOGETHER},
    ),
    "in parts, a pipeline": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}, PIPELINE),
}
# name -> (recipe changes, ranks, shard or None for whole weights, further arguments of `replicated`)
SHARDED: dict[str, tuple[dict[str, Any], int, int | None, dict[str, Any]]] = {
    "two ranks, one copy": (RATES, 2, 2, {}),
    "two copies of two parts each, tied": (TIED, 8, 2, {"tp": 2, "sp": True}),
    "more ranks than rows of a norm": ({"model__encoders": {"fine": FINE}, "train__global_batch": 8}, 8, 8, {}),
    "kept weights, dispatched": (ZERO_2, 4, 2, {"dispatch": "all"}),
    "whole weights, encoders first": ({}, 4, None, {"dispatch": "all", "encoder_first_in": 1}),
    "experts, ep2": (SIX_EXPERTS, 4, 4, {"ep": 2}),
}


def with_muon(settings: Recipe) -> Recipe:
    """Return a recipe whose linears are trained by Muon."""
    optimizer = settings.train.optimizer.model_copy(update={"kind": "muon"})
    return settings.model_copy(update={"train": settings.train.model_copy(update={"optimizer": optimizer})})


def assert_muon_equals_one_process(settings: Recipe, chosen: Plan) -> None:
    assert settings.train.optimizer.kind == "muon"
    assert_equals_one_process(settings, chosen, texts_between=True)


FIRST, *REST = CASES
FIRST_SHARDED, *REST_SHARDED = SHARDED


@pytest.mark.parametrize("case", [FIRST, *mostly_long(REST, every=3)])
def test_muon_trains_as_in_one_process(case: str) -> None:
    changes, meshes = CASES[case]
    settings = recipe(**MUON | changes)
    assert_muon_equals_one_process(settings, plan(settings, **meshes))


@pytest.mark.parametrize("case", mostly_long(ORDERED, every=2))
def test_muon_trains_as_in_one_process_where_units_share_ranks(case: str) -> None:
    changes, meshes, order = ORDERED[case]
    settings = recipe(**MUON | changes)
    assert_muon_equals_one_process(settings, plan(settings, "explicit", order, **meshes))


@pytest.mark.parametrize("case", [FIRST_SHARDED, *mostly_long(REST_SHARDED, every=2)])
def test_muon_trains_sharded_units_as_in_one_process(case: str) -> None:
    changes, num_ranks, shard, arguments = SHARDED[case]
    settings = recipe(**MUON | changes)
    assert_muon_equals_one_process(settings, replicated(settings, num_ranks, shard, **arguments))


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.frozen != "adapters"], ids=str)
def test_cells_train_by_muon_as_in_one_process(cell: Cell) -> None:
    settings = with_muon(cell.recipe())
    assert_muon_equals_one_process(settings, cell.plan())


@pytest.mark.slow
@pytest.mark.parametrize("placement", [(), REPLICATED], ids=["disaggregated", "replicated"])
def test_a_killed_run_continues_bit_for_bit(data: Path, tmp_path: Path, placement: tuple[str, ...]) -> None:
    changes = ("train.optimizer.kind=muon", "train.deterministic=true", *placement)
    killed = kill_and_resume(data, tmp_path, *changes)
    checkpoint = open_newest_good(killed.run_dir / CHECKPOINTS_FOLDER, refuse)
    block = [name.removeprefix("llm.layers.1.") for name in checkpoint.names() if name.startswith("llm.layers.1.")]
    linear, norm = "mlp.linear_fc1.weight", "pre_mlp_layernorm.weight"
    assert sorted(name for name in block if linear in name) == [linear, f"{linear}#momentum"]
    assert sorted(name for name in block if norm in name) == [norm, f"{norm}#exp_avg", f"{norm}#exp_avg_sq"]
    other = request_for(data, killed.run_dir, "train.optimizer.kind=adamw", *changes[1:], resume=True)
    assert "train.optimizer.kind" in run_all(other, other)[0]


@pytest.mark.slow
def test_a_run_continues_on_other_ranks_and_in_another_placement(data: Path, tmp_path: Path) -> None:
    muon = ("train.optimizer.kind=muon",)
    unbroken, moved = (tmp_path / name for name in ("unbroken", "moved"))
    whole = request_for(data, unbroken, *muon)
    assert run_all(whole, whole) == ["", ""]
    first = request_for(data, moved, *muon, f"train.steps={NUM_STEPS - 4}")
    assert run_all(first, first) == ["", ""]
    sharded = ("parallel.placement=replicated", "parallel.shard=all", "cluster.ranks=4")
    second = request_for(data, moved, *muon, *sharded, f"train.steps={NUM_STEPS - 2}", resume=True, ranks=4)
    assert run_all(second, second, second, second) == [""] * 4
    last = request_for(data, moved, *muon, "parallel.placement=unified", "parallel.llm.tp=2", resume=True)
    assert run_all(last, last) == ["", ""]
    assert_same_course(moved, unbroken)
