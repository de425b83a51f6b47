"""Plans in which ranks share the sequences of the LLM (context parallelism)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import SampleLengths
from mmtrain.balance.context_split import MAX_IMBALANCE
from mmtrain.errors import PlanError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.advise.finish import sp_ratio
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import model_timing, scheduled_graph, simulate_layout
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.layer_costs.layer_partition import anchored_partition, layer_chains, partitioned_layout
from mmtrain.planning.space.budget import DEFAULT_BUDGET
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.planning.space.constraints import unit_choices
from mmtrain.program.ir.actions import Backward, Forward
from mmtrain.program.ir.graph import LLM, Microbatch
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.report.plan_view import plan_table
from tests.planning.factory import lengths, recipe
from tests.plans import mesh_assignments, plan_recipe

LONG = 65_536
DELTA_NETS: dict[str, Any] = {
    "delta_net": {"key_heads": 8, "value_heads": 16, "key_head_dim": 64, "value_head_dim": 128},
    "full_attention_blocks": (3,),
}


def long_recipe(
    placement: str = "unified",
    memory_gib: float | None = None,
    global_batch: int = 4,
    blocks: Mapping[str, Any] = MappingProxyType({}),
    **llm: Any,
) -> Recipe:
    """Return a model whose samples have up to 64k tokens, which need more memory than communicators.

    blocks: settings of the LLM's blocks; llm: its degrees.
    """
    return recipe(
        llm={"heads": 16, "kv_heads": 4, "hidden": 2048, "ffn": 4096, **blocks},
        parallel={"placement": placement, "llm": llm},
        cluster={"memory_gib": memory_gib, "ranks_per_node": 4},
        global_batch=global_batch,
        seq_len=LONG,
    )


def long_lengths() -> SampleLengths:
    """Return the factory's samples, of which every tenth has fifty thousand tokens of text."""
    samples = lengths()
    is_long = np.arange(len(samples)) % 10 == 0
    tokens = np.where(is_long, samples.tokens + 50_000, samples.tokens)
    return SampleLengths(tokens, samples.targets, samples.items)


def evaluated(settings: Recipe, world_size: int = 4) -> Evaluator:
    problem = formulate_problem(
        settings, long_lengths(), world_size=world_size, hardware="h100-80g", recipe_sha256="f" * 64
    )
    return Evaluator(problem)


def planned(settings: Recipe, world_size: int = 4) -> Plan:
    return plan_recipe(settings, long_lengths(), world_size=world_size, hardware="h100-80g", recipe_sha256="f" * 64)


def assignment_of(evaluator: Evaluator, cp: int, pp: int = 1, dp: int = 1) -> MeshAssignment:
    """Return the assignment with these sizes of the LLM's mesh and tp 1."""
    every = mesh_assignments(evaluator.problem.choices, cp * pp * dp)
    sizes = (1, pp, dp, 1, cp)
    return next(
        a
        for a in every
        if (a.meshes[LLM].tp, a.meshes[LLM].pp, a.meshes[LLM].dp, a.meshes[LLM].vpp, a.meshes[LLM].cp) == sizes
    )


def test_the_parts_of_a_microbatch_are_the_whole() -> None:
    evaluator = evaluated(long_recipe())
    costs = evaluator.layer_costs
    whole = costs.loads.of_unit(LLM, assignment_of(evaluator, cp=1).batch_split)
    parts = costs.loads.of_unit(LLM, assignment_of(evaluator, cp=4).batch_split)
    assert parts.tokens.shape[1] == 4
    np.testing.assert_array_equal(parts.tokens.sum(axis=1), whole.tokens.sum(axis=1))
    np.testing.assert_allclose(parts.sum_sq.sum(axis=1), whole.sum_sq.sum(axis=1), rtol=1e-4)
    assert parts.exchanged is not None
    assert (parts.exchanged <= parts.tokens).all()
    assert parts.exchanged.any()


@pytest.mark.parametrize(("cp", "pp", "blocks"), [(2, 1, {}), (4, 1, {}), (2, 2, {}), (2, 2, DELTA_NETS)])
def test_the_estimate_and_the_simulation_agree(cp: int, pp: int, blocks: dict[str, Any]) -> None:
    evaluator = evaluated(long_recipe(blocks=blocks), world_size=cp * pp)
    assignment = assignment_of(evaluator, cp, pp)
    layer_costs, choices = evaluator.layer_costs, evaluator.problem.choices
    partition = anchored_partition(assignment, layer_costs, choices, evaluator.memory_bytes)
    assert partition is not None
    chains = layer_chains(assignment, layer_costs, choices)
    [estimate] = evaluator.estimator(None).estimate(assignment, chains, [partition], [None] * len(chains))
    layout = partitioned_layout(assignment, layer_costs, partition)
    simulated = simulate_layout(layout, layout.default_schedule, layer_costs, evaluator.problem.hardware)
    assert estimate == pytest.approx(simulated.step_time_s, rel=0.02)  # messages between units are not estimated
    assert estimate <= simulated.step_time_s * 1.0001


def test_the_timing_of_a_plan_is_that_of_the_search() -> None:
    """A pass takes as long as on the slowest of the ranks that share its microbatch, whichever is asked for."""
    evaluator = evaluated(long_recipe())
    assignment = assignment_of(evaluator, cp=4)
    layer_costs = evaluator.layer_costs
    partition = anchored_partition(assignment, layer_costs, evaluator.problem.choices, evaluator.memory_bytes)
    assert partition is not None
    layout = partitioned_layout(assignment, layer_costs, partition)
    graph = scheduled_graph(layout, layout.default_schedule, layer_costs)
    seconds = layer_costs.stage_seconds(graph)
    loads = layer_costs.loads.of_step(assignment.batch_split, 0)
    timing = model_timing(graph, layer_costs, loads, evaluator.problem.hardware)
    [stage] = [stage.id for stage in graph.stages if stage.id.unit == LLM]
    for index in range(4):
        passes = [
            [timing.compute(kind(stage, Microbatch(LLM, r, index))) for r in range(4)] for kind in (Forward, Backward)
        ]
        np.testing.assert_allclose(passes[0], seconds[stage].forward[0, :, index], rtol=1e-6)
        np.testing.assert_allclose(passes[1], seconds[stage].backward[0, :, index], rtol=1e-6)
        assert len({f"{value:.9g}" for value in passes[0]}) == 1


def test_long_samples_are_shared_where_that_is_faster() -> None:
    plan = planned(long_recipe(global_batch=1))
    assert plan.units[LLM].cp == 4
    assert (plan.units["vision"].cp, plan.units["vision"].dp) == (1, 4)  # images are divided over the same ranks
    assert plan.predicted.balance is not None
    shared = plan.predicted.balance.shared
    assert shared is not None
    assert (shared.sequences, shared.tokens) == (1, 1), "a batch of one sample leaves nothing to put beside it"
    assert 1 <= shared.work_over_mean <= MAX_IMBALANCE
    text = plan_table(plan, 200)
    assert "Of the LLM's sequences 100.0% are cut for 4 ranks, with 100% of the tokens" in text
    assert set(shared.sp_ratio) == {"vision", LLM}
    assert shared.sp_ratio[LLM] < 0.01, "a cut sequence is divided evenly"
    assert f"vision {shared.sp_ratio['vision']:.3f}, llm {shared.sp_ratio[LLM]:.3f}." in text
    alone = planned(long_recipe(global_batch=1, cp=1))
    assert alone.predicted.balance is not None
    assert alone.predicted.balance.shared is None
    assert plan.predicted.step_time_s < 0.95 * alone.predicted.step_time_s
    graph = stage_graph(plan, build_model_shape(long_recipe()))
    assert graph.mesh(LLM).cp_replicas(2) == range(4)


def test_long_samples_of_gated_delta_nets_are_shared_where_that_is_faster() -> None:
    plan = planned(long_recipe(global_batch=1, blocks=DELTA_NETS))
    assert (plan.units[LLM].cp, plan.units[LLM].cp_method) == (4, "ulysses")
    alone = planned(long_recipe(global_batch=1, blocks=DELTA_NETS, cp=1))
    assert plan.predicted.step_time_s < alone.predicted.step_time_s


def test_the_sp_ratio_is_the_dist_ratio_of_the_ranks_that_share_a_microbatch() -> None:
    """Compare with eq. 2 of OmniBal, computed from the items of every microbatch."""
    evaluator = evaluated(long_recipe(), world_size=8)
    assignment = assignment_of(evaluator, cp=4, dp=2)
    layer_costs = evaluator.layer_costs
    partition = anchored_partition(assignment, layer_costs, evaluator.problem.choices, evaluator.memory_bytes)
    assert partition is not None
    layout = partitioned_layout(assignment, layer_costs, partition)
    graph = scheduled_graph(layout, layout.default_schedule, layer_costs)
    vision, llm = graph.mesh("vision"), graph.mesh(LLM)
    assert (vision.dp, llm.dp, llm.cp) == (8, 2, 4)
    expected = []
    for batch in layer_costs.loads.lay_out(assignment.batch_split):
        items = batch.items["vision"]
        for replica in range(llm.dp):
            for index in range(vision.num_microbatches):
                rows = [items.microbatch(replica * llm.cp + rank, index) for rank in range(llm.cp)]
                tokens = np.array([items.tokens[of_rank].sum() for of_rank in rows])
                expected.append(float((tokens.max() - tokens).sum() / (tokens.max() * 4)) if tokens.max() else 0.0)
    assert sp_ratio(graph, "vision", layer_costs) == pytest.approx(np.mean(expected), abs=1e-4)


def test_a_fixed_degree_and_method_are_kept() -> None:
    plan = planned(long_recipe(cp=2, cp_method="ring", cp_split="even"))
    llm = plan.units[LLM]
    assert (llm.cp, llm.cp_method, llm.cp_split) == (2, "ring", "even")
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_ranks_of_their_own_may_share_sequences() -> None:
    plan = planned(long_recipe("disaggregated", cp=2))
    assert (plan.placement, plan.units[LLM].cp, plan.units["vision"].cp) == ("disaggregated", 2, 1)
    assert len(plan.units[LLM].ranks) + len(plan.units["vision"].ranks) == 4


def test_short_sequences_are_not_shared_unless_asked_for() -> None:
    settings = recipe()
    assert unit_choices(settings, build_model_shape(settings), 8)[LLM].cp == (1,)
    assert unit_choices(long_recipe(), build_model_shape(long_recipe()), 8)[LLM].cp == (1, 2, 4, 8)
    sharing = formulate_problem(
        recipe(parallel={"llm": {"cp": 2}}), lengths(), world_size=4, hardware="cpu-core", recipe_sha256="f" * 64
    )
    assert sharing.constraints.placements == ("unified", "disaggregated")


def test_rings_go_between_nodes() -> None:
    choices = unit_choices(long_recipe(), build_model_shape(long_recipe()), 4)[LLM]
    methods = {(tp, cp): method for tp, cp, method in choices.cp_methods}
    assert (methods[1, 4], methods[1, 8], methods[2, 2], methods[2, 4]) == ("ulysses", "ring", "ulysses", "ring")
    assert DEFAULT_BUDGET.meshes.min_tokens_per_cp_rank * 8 == LONG


def test_states_of_heads_do_not_go_round() -> None:
    """Eight key heads are shared by at most eight ranks of tensor and context parallelism."""
    settings = long_recipe(blocks=DELTA_NETS)
    choices = unit_choices(settings, build_model_shape(settings), 16)[LLM]
    assert {(tp, cp) for tp, cp, _ in choices.cp_methods} == {
        (tp, cp) for tp in (1, 2, 4) for cp in (2, 4, 8) if tp * cp <= 8
    }
    assert {method for _, _, method in choices.cp_methods} == {"ulysses"}


@pytest.mark.parametrize("placement", ["unified", "replicated"])
def test_sharing_is_suggested_where_nothing_fits_without_it(placement: str) -> None:
    degrees: dict[str, Any] = {"placement": placement, "tp": 1, "pp": 1, "recompute": "all"}
    alone = planned(long_recipe(cp=1, **degrees))
    least_gib = max(alone.predicted.peak_memory_gib.values())
    with pytest.raises(PlanError, match=r"Any one of these makes room: .*parallel\.llm\.cp: \d") as error:
        planned(long_recipe(memory_gib=0.7 * least_gib, cp=1, **degrees))
    cp = int(str(error.value).split("parallel.llm.cp: ")[1][0])
    plan = planned(long_recipe(memory_gib=0.7 * least_gib, cp=cp, **degrees))
    assert plan.placement == placement
    assert plan.units[LLM].cp == cp
