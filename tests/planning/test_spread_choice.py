"""The spread of the ranks' times in plans: bounds hold under it, and plans name what another spread would change."""

import numpy as np
import pytest

from mmtrain.errors import PlanError
from mmtrain.planning.advise.finish import finish_plan
from mmtrain.planning.advise.spread_choice import other_choices
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_partition import chain_time_lower_bound, partitioned_layout
from mmtrain.planning.space.candidate import Candidate, MeshAssignment
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.report.plan_view import plan_table
from tests.planning import factory
from tests.planning.exhaustive import all_candidates, all_partitions


def uneven(ranks: float, layers: float, gb_per_s: float = 370.0, **settings: object) -> PlanningProblem:
    cluster = {
        "hardware": "h100-80g",
        "time_spread": {"ranks": ranks, "layers": layers},
        "intra_node_gb_per_s": gb_per_s,
    }
    settings_of_test = factory.recipe(cluster=cluster, **settings)  # type: ignore[arg-type]
    return factory.problem_for(settings_of_test, "h100-80g", 4)


def test_estimates_bound_the_simulator_where_ranks_are_uneven() -> None:
    evaluator = Evaluator(uneven(0.1, 0.05))
    rng, estimator, errors = np.random.default_rng(0), evaluator.estimator(None), []
    for candidate in list(all_candidates(evaluator, 4))[::4]:
        chains = evaluator.layer_chains(candidate)
        partitions = list(all_partitions(chains))
        partition = partitions[rng.integers(len(partitions))]
        [estimate_s] = estimator.estimate(candidate.assignment, chains, [partition], [None] * len(chains))
        layout = partitioned_layout(candidate.assignment, evaluator.layer_costs, partition)
        step_time_s = factory.simulated(layout, evaluator).step_time_s
        assert 0 < max(map(chain_time_lower_bound, chains)) <= estimate_s * (1 + 1e-9), candidate.assignment
        assert estimate_s <= step_time_s * (1 + 1e-9), candidate.assignment
        errors.append(step_time_s / estimate_s - 1)
    assert np.median(errors) < 0.05


def pair_of(layers: float) -> tuple[Evaluator, list[Candidate]]:
    """Simulate a large LLM on slow links: tensor-parallel ranks meet in every layer, data-parallel ones once a step."""
    llm = {"hidden": 1024, "ffn": 4096, "heads": 8, "vocab": 32_000}
    parallel = {"bucket_parameters": 1_000_000_000}  # nothing hides what data-parallel ranks exchange
    problem = uneven(0.0, layers, gb_per_s=92.0, vision=None, llm=llm, parallel=parallel, global_batch=4)
    evaluator = Evaluator(problem)
    candidates = []
    for mesh in (MeshSize(4, 1, 1), MeshSize(1, 1, 4)):
        assignment = MeshAssignment("unified", {"llm": mesh}, {"llm": 4 // mesh.dp})
        layout = factory.anchor_layout(assignment, evaluator.layer_costs, problem.choices)
        assert layout is not None
        candidates.append(factory.simulated(layout, evaluator))
    return evaluator, sorted(candidates, key=lambda candidate: candidate.step_time_s)


@pytest.mark.parametrize(("layers", "spread", "winner"), [(0.2, "twice the", "dp4"), (0.4, "no", "tp4")])
def test_a_plan_that_wins_under_another_spread_is_named(layers: float, spread: str, winner: str) -> None:
    evaluator, candidates = pair_of(layers)
    assert winner not in candidates[0].layout.summary
    [choice] = other_choices(candidates, evaluator)
    assert choice.spread == spread
    assert winner in choice.summary
    plan = finish_plan(candidates[0], evaluator, other_choices=(choice,))
    sentence = f"With {spread} spread of the ranks' times (cluster.time_spread) the choice would be {choice.summary}"
    assert sentence in " ".join(plan_table(plan).split())
    assert Plan.model_validate_json(plan.model_dump_json()) == plan


def test_a_plan_that_nothing_overtakes_has_no_other_choice() -> None:
    evaluator, candidates = pair_of(0.01)
    assert other_choices(candidates, evaluator) == ()
    evaluator, candidates = pair_of(0.0)
    assert other_choices(candidates, evaluator) == ()


def test_ranks_that_differ_too_much_are_refused() -> None:
    """One node of eight that takes 1.3 times as long is a deviation of 0.1, and is planned for."""
    assert uneven(0.1, 0.0).hardware.slowest_rank_ratio == pytest.approx(1.103, abs=1e-3)
    message = r"cluster.time_spread.ranks: 1 found, with which the slowest of 4 ranks takes 2.0 times .* Leave the slow"
    with pytest.raises(PlanError, match=message):
        uneven(1.0, 0.0)
