"""Gradients that replicas send each other in bf16 are rounded once each, and added up in fp32 in the replicas' order.

The oracle knows what every rank has computed by itself, in fp32: it rounds these numbers and adds them up.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.stage import fully_sharded
from mmtrain.planning import Plan
from mmtrain.program import Forward
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import RanksFailed, run_ranks
from tests.faults import FailAt
from tests.flow.cases import AUDIO, Mesh, plan, recipe, step_data
from tests.flow.cells import ADAPTED
from tests.flow.equality import train_steps
from tests.flow.gather import copy, whole
from tests.flow.runs import SHARDED as SHARDED_RUN
from tests.flow.runs import assert_same_end, request_for, run_all
from tests.flow.test_replicated import replicated

MAX_LOSS_CHANGE = 1e-3  # relative: a contribution is rounded by up to 2^-9, with either sign
BF16: dict[str, Any] = {"train__grad_reduce": "bf16"}
TIED: dict[str, Any] = {"model__llm__tie_embeddings": True}
SPEECH: dict[str, Any] = {"model__audio": AUDIO}
PARTLY_FROZEN = {"train__freeze": ("llm.layers.1.*", "vision.layers.1.mlp.*", "llm.layers.2.*norm.weight")}
PAIR = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}
# name -> recipe changes, meshes; where replicas have whole weights. Some have ranks without replicas.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "unified dp2": ({}, PAIR),
    "one bucket": ({}, {unit: Mesh((), (0, 1), dp=2, bucket_parameters=None) for unit in PAIR}),
    "partly frozen": (PARTLY_FROZEN, PAIR),
    "adapters": (ADAPTED, PAIR),
    "tied, both ends on a rank, tp2 dp2 with slices of tokens, recomputed": (
        TIED,
        {
            "vision": Mesh((), (0, 1, 2, 3), tp=2, dp=2, sp=True, recompute=(1,)),
            "llm": Mesh((), (0, 1, 2, 3), tp=2, dp=2, sp=True, recompute=(1, 2)),
        },
    ),
    "disaggregated, dp2 and tied pp2 vpp2 dp2": (
        TIED,
        {"vision": Mesh((), (4, 5), dp=2), "llm": Mesh((2, 3, 4), (0, 2, 1, 3), vpp=2, dp=2)},
    ),
    "disaggregated, dp 1 and 4": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2, 3, 4), dp=4)}),
    "three replicas of three units": (
        SPEECH | {"train__global_batch": 6},
        {unit: Mesh((), (0, 1, 2), dp=3) for unit in ("vision", "audio", "llm")},
    ),
    "colocated": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1))}),
    "ring of two that share sequences": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), cp=2, method="ring")},
    ),
}


def _world() -> World:
    return World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))


# Each adds an axis that another case or test of the quick tier has.
SLOW_CASES = {
    "tied, both ends on a rank, tp2 dp2 with slices of tokens, recomputed",
    "disaggregated, dp2 and tied pp2 vpp2 dp2",
}


def _in_tiers(cases: Iterable[str], slow: Container[str]) -> list[ParameterSet]:
    return [pytest.param(case, id=case, marks=[pytest.mark.slow] if case in slow else []) for case in cases]


Reduced = tuple[float, float, list[NamedShard]]  # of a step on a rank: loss, gradient norm, gradients


def _one_step(settings: Recipe, chosen: Plan) -> Reduced:
    """Return a step's loss, gradient norm and gradients on this rank."""
    context = build_rank_context(settings, chosen, _world())
    outcome = context.train(step_data(context, 0), 0.01)
    assert outcome.grad_norm is not None
    return (
        outcome.loss,
        outcome.grad_norm,
        [copy(shard) for unit in context.optimizer.units.values() for shard in unit.gradients()],
    )


# By name and place in the TP group: of each replica its own gradient; and whether the group adds up parts of it.
Contributions = dict[tuple[str, int], tuple[int, Tensor, bool]]


def _own_gradients(settings: Recipe, chosen: Plan) -> Contributions:
    """Return what this rank computes of each gradient by itself, in fp32, in a step that reduces nothing."""
    own: Contributions = {}

    def record(optimizer: ZeroAdamW) -> None:
        groups = optimizer._groups
        for param in optimizer._trained:
            local = optimizer._params[param]
            if local.owned:
                is_partial = getattr(param, "sequence_parallel", False)
                gradient = param.main_grad.flatten().clone()  # type: ignore[attr-defined]
                own[local.spec.name, groups.tp_rank] = groups.dp_rank, gradient, is_partial

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ZeroAdamW, "reduce_grads", lambda *_: None)
        patched.setattr(ZeroAdamW, "finish_reduction", record)
        _one_step(settings, chosen)
    return own


def _reduced(by_rank: Sequence[Contributions], rounds: bool) -> dict[tuple[str, int], Tensor]:
    """Add up what the ranks have, in the order of the replicas, and then what TP groups have."""
    replicas: dict[tuple[str, int], dict[int, Tensor]] = {}
    partial_names = set()
    for own in by_rank:
        for (name, tp_rank), (dp_rank, gradient, is_partial) in own.items():
            replicas.setdefault((name, tp_rank), {})[dp_rank] = gradient
            if is_partial:
                partial_names.add(name)
    summed = {}
    for key, by_replica in replicas.items():
        total = torch.zeros_like(by_replica[0])
        for _, gradient in sorted(by_replica.items()):
            is_rounded = rounds and len(by_replica) > 1
            total += gradient.to(torch.bfloat16).float() if is_rounded else gradient
        summed[key] = total
    for name in partial_names:
        keys = [key for key in summed if key[0] == name]
        of_group = sum(summed[key] for key in keys)
        summed |= dict.fromkeys(keys, of_group)  # type: ignore[arg-type]
    return summed


def _own_and_reduced(by_kind: dict[str, Recipe], chosen: Plan) -> tuple[Contributions, dict[str, Reduced]]:
    """Return what this rank computes by itself, and a step with every kind of reduction."""
    own = _own_gradients(by_kind["fp32"], chosen)
    return own, {kind: _one_step(settings, chosen) for kind, settings in by_kind.items()}


@pytest.mark.parametrize("case", _in_tiers(CASES, SLOW_CASES))
def test_gradients_are_the_sums_of_what_ranks_have(case: str) -> None:
    """Bit for bit in bf16, and in fp32 where there are two replicas, whose sum has one order."""
    changes, meshes = CASES[case]
    by_kind = {kind: recipe(**changes, train__grad_reduce=kind) for kind in ("fp32", "bf16")}
    schedule: ScheduleKind = "coarse" if case == "colocated" else "1f1b"
    chosen = plan(by_kind["bf16"], schedule, **meshes)
    ranks = run_ranks(chosen.world_size, _own_and_reduced, by_kind, chosen)
    for kind in by_kind:
        expected = _reduced([own for own, _ in ranks], rounds=kind == "bf16")
        is_exact = kind == "bf16" or max(mesh.dp for mesh in meshes.values()) == 2
        _assert_reduced([reduced[kind] for _, reduced in ranks], expected, 0.0 if is_exact else 1e-6)


def _assert_reduced(ranks: list[Reduced], expected: dict[tuple[str, int], Tensor], tolerance: float) -> None:
    names = set()
    for shard in (shard for _, _, shards in ranks for shard in shards):
        lo, hi = shard.flat or (0, shard.tensor.numel())
        of_oracle = expected[shard.name, shard.tp_rank][lo:hi]
        torch.testing.assert_close(shard.tensor.flatten(), of_oracle, rtol=tolerance, atol=tolerance, msg=shard.name)
        names.add(shard.name)
    assert names == {name for name, _ in expected}
    norm = torch.cat([shard.tensor.flatten() for _, _, shards in ranks for shard in shards]).double().norm()
    assert [norm_of_rank for _, norm_of_rank, _ in ranks] == pytest.approx([float(norm)] * len(ranks), rel=1e-6)


class _GatheredReduceScatter(DefaultReduceScatter):
    """FSDP2's reduce-scatter as the oracle does it: every rank gets all of every rank in fp32."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        gathered = input_tensor.new_empty(group.size(), input_tensor.numel())
        dist.all_gather_into_tensor(gathered.view(-1), input_tensor, group=group)
        total = torch.zeros_like(input_tensor)
        for of_rank in gathered:
            total += of_rank.to(torch.bfloat16).float()
        output_tensor.copy_(total.view(group.size(), -1)[group.rank()])


def _steps_of_all(in_bf16: Recipe, in_fp32: Recipe, chosen: Plan) -> Any:
    """Train by the oracle, by the plan, and by the plan with gradients that are not rounded."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fully_sharded, "RoundedReduceScatter", _GatheredReduceScatter)
        by_oracle = train_steps(in_bf16, chosen, False)
    return by_oracle, train_steps(in_bf16, chosen, False), train_steps(in_fp32, chosen, False)


# name -> recipe changes, ranks, shard, more of the plan
SHARDED: dict[str, tuple[dict[str, Any], int, int, dict[str, Any]]] = {
    "one copy": ({}, 2, 2, {}),
    "one copy of four, some dispatched, audio, tied": (SPEECH | TIED, 4, 4, {"dispatch": "all"}),
    "two copies, recomputed": (TIED, 4, 2, {"recompute": (1, 3)}),
    "kept weights": ({"parallel__placement": "replicated", "parallel__zero": 2}, 2, 2, {}),
    "tp inside with slices of tokens": (SPEECH, 4, 2, {"tp": 2, "sp": True}),
    "ring inside": (SPEECH, 2, 2, {"cp": 2, "method": "ring", "dispatch": "none"}),
    "encoders first": (SPEECH, 2, 2, {"dispatch": "all", "encoder_first_in": 1}),
    "adapters": (ADAPTED, 2, 2, {}),
    "frozen encoder": ({"model__vision__freeze": True}, 2, 2, {}),
}


SLOW_SHARDED = {
    "one copy of four, some dispatched, audio, tied",
    "tp inside with slices of tokens",
    "ring inside",
    "encoders first",
}


@pytest.mark.parametrize("case", _in_tiers(SHARDED, SLOW_SHARDED))
def test_sharded_units_add_up_rounded_gradients(case: str) -> None:
    """Each backward's gradients by themselves, inside a copy; between copies they are added up in fp32."""
    changes, num_ranks, shard, more = SHARDED[case]
    settings = recipe(**changes, **BF16)
    chosen = replicated(settings, num_ranks, shard, **more)
    ranks = run_ranks(num_ranks, _steps_of_all, settings, recipe(**changes), chosen)
    expected, found, in_fp32 = zip(*ranks, strict=True)
    assert [steps for steps, _ in found] == [steps for steps, _ in expected]
    assert [steps for steps, _ in found] != [steps for steps, _ in in_fp32]
    gradients, of_oracle = (whole([g for _, of_rank in way for g in of_rank]) for way in (found, expected))
    assert gradients.keys() == of_oracle.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, of_oracle[name], rtol=0.0, atol=0.0, msg=name)


@pytest.mark.slow  # 15 s each
@pytest.mark.parametrize("placement", [("parallel.placement=unified", "parallel.llm.dp=2"), SHARDED_RUN], ids=str)
def test_runs_repeat_their_bits_and_continue_after_a_kill(
    placement: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    settings = (*placement, "train.grad_reduce=bf16")
    unbroken, again, killed = (request_for(data, tmp_path / n, *settings) for n in ("unbroken", "again", "killed"))
    for request in (unbroken, again):
        assert run_all(request, request) == ["", ""]
    assert_same_end(again.run_dir, unbroken.run_dir)
    with pytest.raises(RanksFailed, match="died without a word"):
        run_all(killed, killed, faults=FailAt(0, 3, "kill", action=Forward))
    resumed = replace(killed, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(killed.run_dir, unbroken.run_dir)
    in_fp32 = request_for(data, tmp_path / "fp32", *placement)
    assert run_all(in_fp32, in_fp32) == ["", ""]
    losses, of_fp32 = ([s["loss"] for s in read_metrics(request.run_dir)] for request in (unbroken, in_fp32))
    assert losses != of_fp32
    assert losses == pytest.approx(of_fp32, rel=MAX_LOSS_CHANGE)


def _losses(settings: Recipe, chosen: Plan, num_steps: int) -> list[float]:
    context = build_rank_context(settings, chosen, _world())
    return [context.train(step_data(context, step % 4), 0.01).loss for step in range(num_steps)]


def test_a_model_learns_as_with_gradients_in_fp32() -> None:
    """Four batches, five times each: the losses fall alike, and are not those of fp32 bit for bit."""
    losses = {}
    for grad_reduce in ("fp32", "bf16"):
        settings = recipe(train__grad_reduce=grad_reduce)
        ranks = run_ranks(2, _losses, settings, plan(settings, **PAIR), 20)
        losses[grad_reduce] = np.sum(ranks, axis=0)
    assert losses["fp32"][-1] < 0.7 * losses["fp32"][3]
    assert (losses["bf16"] != losses["fp32"]).any()
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], rtol=MAX_LOSS_CHANGE)
