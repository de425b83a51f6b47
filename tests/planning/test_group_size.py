"""With `data.seq_len: auto` the planner chooses the size of groups for a step of as many samples or tokens."""

from contextlib import suppress
from typing import Any

import pytest

from mmtrain.api.plans import make_plan
from mmtrain.balance import SampleLengths
from mmtrain.data.stream.count_groups import count_groups
from mmtrain.errors import PlanError, RecipeError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import require_match, with_planned_groups
from mmtrain.planning.group_size import numbers_of_groups, with_size_for
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe
from tests.planning.factory import VISION, lengths
from tests.planning.factory import recipe as fixed_recipe

FEW = PlanRequest(num_alternatives=0)
TEXTS = SampleLengths(lengths().tokens, lengths().targets, {})
LONGEST = int(TEXTS.tokens.max())


def recipe(batch: dict[str, int], seq_len: int | str = "auto", **changes: Any) -> Recipe:
    """Return a recipe that states its step in samples or tokens; of an LLM alone, if `changes` have no encoder."""
    cluster = {"hardware": "cpu-core", "ranks": 2} | changes.pop("cluster", {})
    llm = {"layers": 1} | changes.pop("llm", {})
    raw = fixed_recipe(**{"vision": None, "llm": llm, "cluster": cluster, **changes}).model_dump()
    raw["train"]["global_batch"] = batch
    raw["data"] |= {"seq_len": seq_len, "max_sample_tokens": LONGEST}
    return Recipe.model_validate(raw)


def tokens_of_step(plan: Plan) -> float:
    return plan.predicted.tokens_per_s_per_gpu * plan.world_size * plan.predicted.step_time_s


@pytest.mark.parametrize(
    ("batch", "seq_len"), [({"samples": 100}, 700), ({"tokens": 9000}, 700), ({"samples": 100}, "auto")]
)
def test_a_step_holds_what_the_recipe_states(batch: dict[str, int], seq_len: int | str) -> None:
    written = recipe(batch, seq_len, parallel={"placement": "unified"})
    plan = make_plan(written, TEXTS, FEW).plan
    require_match(plan, written, 2, "cpu-core")
    trained = with_planned_groups(written, plan)
    assert trained.train.num_groups == plan.units["llm"].dp * plan.schedule.num_microbatches["llm"]
    assert trained.data.group_tokens == plan.data.seq_len
    if seq_len != "auto":  # what producers make without a plan
        assert count_groups(written, TEXTS) == trained
    [(unit, stated)] = batch.items()
    in_step = plan.data.step_samples if unit == "samples" else tokens_of_step(plan)
    # The number of groups is rounded, and the planner draws few steps.
    assert in_step == pytest.approx(stated, rel=0.5 / plan.num_groups + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["unified", "replicated"])
def test_the_chosen_size_is_the_fastest_of_all(placement: str) -> None:
    written = recipe({"samples": 60}, llm={"layers": 3}, parallel={"placement": placement})
    chosen = make_plan(written, TEXTS, FEW).plan
    sized = [with_size_for(written, TEXTS, number) for number in numbers_of_groups(written, TEXTS, 2)]
    assert len(sized) > 4
    plans = []
    for each in sized:
        with suppress(PlanError):  # groups that no mesh divides
            plans.append(make_plan(each, TEXTS, FEW).plan)
    assert chosen.data.seq_len in [plan.data.seq_len for plan in plans]
    fastest = max(plan.predicted.tokens_per_s_per_gpu for plan in plans)
    assert chosen.predicted.tokens_per_s_per_gpu >= 0.98 * fastest


@pytest.mark.slow
def test_groups_of_an_unbalanced_baseline_are_smaller() -> None:
    """Where nothing balances random groups, the fullest one is what has to fit."""
    parallel: dict[str, Any] = {"placement": "replicated", "shard": "all"}
    for unit in ("llm", "vision"):
        parallel[unit] = {"recompute": "none"}
    cluster = {"memory_gib": 0.02, "ranks": 4}
    raw = recipe({"samples": 240}, cluster=cluster, parallel=parallel, vision=VISION | {"layers": 1}).model_dump()
    raw["data"]["grouping"] = "random"
    written = Recipe.model_validate(raw)
    balanced, baseline = (
        make_plan(written, lengths(), PlanRequest(num_alternatives=0, baseline=name)).plan for name in (None, "fsdp")
    )
    assert (balanced.dispatch, baseline.dispatch) == ("all", "none")
    assert baseline.num_groups > balanced.num_groups
    assert with_planned_groups(written, baseline).data.group_tokens < (balanced.data.seq_len or 0)
    assert baseline.data.step_samples == pytest.approx(balanced.data.step_samples, rel=0.05)


def test_less_memory_leaves_smaller_groups() -> None:
    fixed = {"placement": "unified", "llm": {"recompute": "none", "dp": 2, "tp": 1}}
    sizes = []
    for memory_gib in (0.02, 4.0):
        written = recipe({"tokens": 12_000}, cluster={"memory_gib": memory_gib}, parallel=fixed)
        plan = make_plan(written, TEXTS, FEW).plan
        assert max(plan.predicted.peak_memory_gib.values()) <= memory_gib
        sizes.append(with_planned_groups(written, plan).data.group_tokens)
    assert LONGEST <= sizes[0] < sizes[1]


def test_what_a_recipe_fixes_divides_the_groups() -> None:
    parallel = {"placement": "unified", "llm": {"dp": 3, "num_microbatches": 2}}
    written = recipe({"samples": 64}, 384, parallel=parallel)
    assert count_groups(written, TEXTS).train.num_groups % 6 == 0
    assert all(number % 6 == 0 for number in numbers_of_groups(recipe({"samples": 300}, parallel=parallel), TEXTS, 2))


@pytest.mark.parametrize(
    ("batch", "seq_len", "parallel", "message"),
    [
        ({"samples": 1}, 4096, {}, "train.global_batch: 1 samples are 0.02"),
        ({"tokens": 3000}, 4096, {}, "allowed: at least about 3908 tokens"),
        ({"samples": 8}, 384, {"llm": {"dp": 8}}, "a multiple of 8 groups"),
        ({"samples": 1}, "auto", {}, "no room for the longest sample"),
        ({"samples": 40}, "auto", {"llm": {"dp": 64}}, "in each of 64 groups"),
    ],
)
def test_a_step_that_cannot_be_is_refused(
    batch: dict[str, int], seq_len: int | str, parallel: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        make_plan(recipe(batch, seq_len, parallel=parallel), TEXTS)


def test_what_does_not_plan_asks_for_a_size() -> None:
    with pytest.raises(RecipeError, match="set the groups that the plan states"):
        count_groups(recipe({"samples": 64}), TEXTS)
