"""Buckets of layers change when gradients are reduced and parameters gathered, and no number."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import GatherParams, Partial, ReduceGrads, build_program
from mmtrain.program.ir.data_dependencies import parameter_gathers
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan, recipe
from tests.flow.cells import ADAPTED
from tests.flow.equality import train_steps
from tests.flow.gather import whole

TIED = {"model__llm__tie_embeddings": True}
PARTLY_FROZEN = {"train__freeze": ("llm.layers.1.*", "vision.layers.1.mlp.*", "llm.layers.2.*norm.weight")}
# name -> recipe changes, meshes, buckets on rank 0.
# Vision layers: 0 patches, 1-2 blocks, 3 projector; LLM: 0 embedding, 1-3 blocks, 4 head.
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh], int]] = {
    "dp2": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}, 4 + 5),
    "tp2 dp2 with slices of tokens, recomputed": (
        {},
        {
            "vision": Mesh((), (0, 1, 2, 3), tp=2, dp=2, sp=True, recompute=(1,)),
            "llm": Mesh((), (0, 1, 2, 3), tp=2, dp=2, sp=True, recompute=(1, 2)),
        },
        4 + 5,
    ),
    "pp2 vpp2 dp2": ({}, {"vision": Mesh((), (0,)), "llm": Mesh((2, 3, 4), (0, 2, 1, 3), vpp=2, dp=2)}, 1 + 2 + 1),
    "partly frozen": (PARTLY_FROZEN, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}, 4 + 4),
    "adapters": (ADAPTED, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_bucket_bit_for_bit(case: str) -> None:
    changes, meshes, num_buckets = CASES[case]
    settings = recipe(**changes)
    in_buckets = plan(settings, **meshes)
    in_one = plan(settings, **{name: replace(mesh, bucket_parameters=None) for name, mesh in meshes.items()})
    actions = build_program(stage_graph(in_buckets, build_model_shape(settings))).for_rank(0)
    if num_buckets:
        assert sum(isinstance(action, ReduceGrads) for action in actions) == num_buckets
    found, expected = (run_ranks(p.world_size, train_steps, settings, p, False) for p in (in_buckets, in_one))
    for (steps, _), (steps_of_one, _) in zip(found, expected, strict=True):
        assert [loss for loss, _ in steps] == [loss for loss, _ in steps_of_one]
        norms, norms_of_one = ([norm for _, norm in of_run] for of_run in (steps, steps_of_one))
        assert norms == pytest.approx(norms_of_one, rel=1e-14)  # shards lie elsewhere, and are added in another order
    gradients, of_one = (whole([g for _, gradients in ranks for g in gradients]) for ranks in (found, expected))
    assert gradients.keys() == of_one.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, of_one[name], rtol=0.0, atol=0.0, msg=name)


def test_a_bucket_in_which_nothing_trains_is_passed_over() -> None:
    """The head's: its matrix is the embedding's, and its norm is frozen by name, which sizes of buckets do not know."""
    settings = recipe(**TIED, train__freeze=("*norm.weight",))
    meshes = {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), dp=2)}
    in_one = {name: replace(mesh, bucket_parameters=None) for name, mesh in meshes.items()}
    found, expected = (run_ranks(2, train_steps, settings, plan(settings, **m), False) for m in (meshes, in_one))
    for (steps, _), (steps_of_one, _) in zip(found, expected, strict=True):
        assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in steps_of_one], rel=1e-6)


def test_the_backward_of_the_last_microbatch_starts_a_reduction_behind_each_layer() -> None:
    settings = recipe(**TIED)
    meshes = {"vision": Mesh((), (2,)), "llm": Mesh((), (0, 1), dp=2)}
    actions = build_program(stage_graph(plan(settings, **meshes), build_model_shape(settings))).for_rank(0)
    gathers = [a for a in actions if isinstance(a, GatherParams)]
    assert gathers == [GatherParams("llm", 0, bucket) for bucket in range(5)]
    last = [a for a in actions if isinstance(a, Partial | ReduceGrads)]
    assert last == [
        *(Partial(p.stage, p.mb, "F", layer, layer + 1) for layer, p in enumerate(last[:5]) if isinstance(p, Partial)),
        *(a for part, reduction in zip(last[5::2], last[6::2], strict=True) for a in (part, reduction)),
    ]
    assert last[6::2] == [ReduceGrads("llm", 0, bucket) for bucket in (4, 3, 2, 1, 0)]
    assert [(a.kind, a.lo) for a in last[5::2] if isinstance(a, Partial)] == [("B", layer) for layer in (4, 3, 2, 1, 0)]


@pytest.mark.slow  # 15 s
def test_gathers_under_way_at_once_write_nowhere_else() -> None:
    """As coalesced operations of gloo they write into freed memory, within some thousand of them.

    A rank then ends without a word, or reads what was written there.
    """
    settings = recipe()
    in_buckets = plan(settings, vision=Mesh((), (0, 1), dp=2), llm=Mesh((), (0, 1), dp=2))
    assert run_ranks(2, _gather_again, settings, in_buckets, 3000) == [True, True]


def _gather_again(settings: Recipe, chosen: Plan, times: int) -> bool:
    """Gather all parameters, all buckets at once; return whether they are what they were."""
    rank = dist.get_rank()
    context = build_rank_context(settings, chosen, World(rank, dist.get_world_size(), torch.device("cpu")))
    gathers = parameter_gathers(stage_graph(chosen, build_model_shape(settings)), rank)
    parameters = [p for unit in context.units.values() for stage in unit.stages.values() for p in stage.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    for _ in range(times):
        for gather in gathers:
            context.optimizer.start_gather(gather.unit, gather.chunk, gather.bucket)
        for gather in gathers:
            _ = [torch.empty(size) for size in (7, 150, 900, 1700)]  # takes, and writes to, memory that is freed
            context.optimizer.finish_gather(gather.unit, gather.chunk, gather.bucket)
    return all(map(torch.equal, parameters, before))
