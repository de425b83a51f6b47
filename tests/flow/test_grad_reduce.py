"""Gradients that replicas send each other in bf16 are rounded once each, and added up in fp32 in the replicas' order.

The oracle knows what every rank has computed by itself, in fp32: it rounds these numbers and adds them up.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.megatron.zero_adamw import ZeroAdamW
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import Plan
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import AUDIO, Mesh, plan, recipe, step_data
from tests.flow.cells import ADAPTED
from tests.flow.gather import copy

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


def _one_step(settings: Recipe, chosen: Plan) -> tuple[float, float, list[NamedShard]]:
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


@pytest.mark.parametrize("grad_reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_sums_of_what_ranks_have(case: str, grad_reduce: str) -> None:
    """Bit for bit in bf16, and in fp32 where there are two replicas, whose sum has one order."""
    changes, meshes = CASES[case]
    settings = recipe(**changes, train__grad_reduce=grad_reduce)
    kind: ScheduleKind = "coarse" if case == "colocated" else "1f1b"
    chosen = plan(settings, kind, **meshes)
    by_rank = run_ranks(chosen.world_size, _own_gradients, settings, chosen)
    expected = _reduced(by_rank, rounds=grad_reduce == "bf16")
    ranks = run_ranks(chosen.world_size, _one_step, settings, chosen)
    tolerance = 0.0 if grad_reduce == "bf16" or max(mesh.dp for mesh in meshes.values()) == 2 else 1e-6
    names = set()
    for shard in (shard for _, _, shards in ranks for shard in shards):
        lo, hi = shard.flat or (0, shard.tensor.numel())
        of_oracle = expected[shard.name, shard.tp_rank][lo:hi]
        torch.testing.assert_close(shard.tensor.flatten(), of_oracle, rtol=tolerance, atol=tolerance, msg=shard.name)
        names.add(shard.name)
    assert names == {name for name, _ in expected}
    norm = torch.cat([shard.tensor.flatten() for _, _, shards in ranks for shard in shards]).double().norm()
    assert [norm_of_rank for _, norm_of_rank, _ in ranks] == pytest.approx([float(norm)] * len(ranks), rel=1e-6)
