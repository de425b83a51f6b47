"""Data-parallel collectives of a plan are hidden bucket by bucket, in the estimate as in the simulation."""

from typing import Any

import pytest

from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import layer_chains, layout_graph, partitioned_layout
from mmtrain.program.ir.actions import GatherParams, Partial, ReduceGrads
from mmtrain.program.schedules.builder import build_program
from tests.planning import factory
from tests.plans import mesh_assignments

GPT = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 16, "ffn": 8192, "vocab": 32_000}


def evaluated(
    bucket_parameters: int | None,
    num_ranks: int = 16,
    *,
    tied: bool = False,
    grad_reduce: str = "fp32",
    ranks_per_node: int = 8,
    **llm: Any,
) -> tuple[Evaluator, Any, Any]:
    """Return an evaluator, the only meshes of a GPT of 0.5 billion parameters, and its chains with their partition."""
    parallel = {
        "placement": "unified",
        "bucket_parameters": bucket_parameters,
        "llm": {"tp": 2, "pp": 1, "vpp": 1, **llm},
    }
    cluster = {"ranks_per_node": ranks_per_node}
    settings = factory.recipe(
        vision=None,
        llm=GPT | {"tie_embeddings": tied},
        parallel=parallel,
        cluster=cluster,
        global_batch=16,
        seq_len=4096,
        grad_reduce=grad_reduce,
    )
    evaluator = Evaluator(factory.problem_for(settings, "h100-80g", num_ranks))
    [assignment] = mesh_assignments(evaluator.problem.choices, num_ranks)
    chains = layer_chains(assignment, evaluator.layer_costs, evaluator.problem.choices)
    return evaluator, assignment, (chains, tuple(chain.anchor for chain in chains))


def predicted(bucket_parameters: int | None, **llm: Any) -> tuple[float, float, dict[str, float]]:
    """Return the estimated and the simulated seconds of a step, and the bubbles."""
    evaluator, assignment, (chains, partition) = evaluated(bucket_parameters, **llm)
    [estimate_s] = evaluator.estimator(None).estimate(assignment, chains, [partition], [None] * len(chains))
    candidate = factory.simulated(partitioned_layout(assignment, evaluator.layer_costs, partition), evaluator)
    return estimate_s, candidate.step_time_s, dict(candidate.bubbles)


@pytest.mark.parametrize("grad_reduce", ["fp32", "bf16"])
@pytest.mark.parametrize("llm", [{}, {"recompute": "all"}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"tied": True}], ids=str)
@pytest.mark.parametrize("bucket_parameters", [1, None, 1_000_000_000])
def test_the_estimate_is_just_below_the_simulation(
    bucket_parameters: int | None, llm: dict[str, Any], grad_reduce: str
) -> None:
    estimate_s, step_time_s, _ = predicted(bucket_parameters, grad_reduce=grad_reduce, **llm)
    assert step_time_s * 0.97 <= estimate_s <= step_time_s * (1 + 1e-9)


def test_buckets_hide_most_of_what_one_bucket_leaves_to_wait_for() -> None:
    _, whole_s, whole = predicted(1_000_000_000)
    _, hidden_s, hidden = predicted(None)
    assert hidden_s < whole_s
    exposed, left = (whole["dp_gather"] + whole["dp_reduce"]) * whole_s, (hidden["dp_gather"] + hidden["dp_reduce"])
    assert left * hidden_s < 0.6 * exposed


def test_gradients_in_bf16_save_what_a_slow_reduction_exposes() -> None:
    """Two ranks of a replica fill a node, so that half the bytes pass through each port; the rest is copies."""
    exposed_s = []
    for grad_reduce in ("fp32", "bf16"):
        _, step_time_s, bubbles = predicted(1_000_000_000, grad_reduce=grad_reduce, ranks_per_node=2)
        exposed_s.append(bubbles["dp_reduce"] * step_time_s)
    fp32, bf16 = exposed_s
    assert 0.45 * fp32 < bf16 < 0.75 * fp32


def test_the_plan_runs_what_was_simulated() -> None:
    evaluator, assignment, (_, partition) = evaluated(None)
    graph = layout_graph(partitioned_layout(assignment, evaluator.layer_costs, partition), evaluator.layer_costs)
    [stage] = graph.stages
    # On one of two ranks, a block has 25 million parameters, and a vocabulary matrix 33 million.
    assert stage.bucket_starts == (0, 2, 4, 6, 8)
    actions = build_program(graph).for_rank(0)
    gathers = [a for a in actions if isinstance(a, GatherParams)]
    assert [a.bucket for a in gathers] == [0, 1, 2, 3, 4]
    kinds = [a for a in actions if isinstance(a, Partial | ReduceGrads)]
    assert [type(a) for a in kinds] == [Partial] * 5 + [Partial, ReduceGrads] * 5
    assert [a.bucket for a in kinds if isinstance(a, ReduceGrads)] == [4, 3, 2, 1, 0]
