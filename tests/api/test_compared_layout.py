"""`plan --compare` reads sizes and Megatron-LM's arguments, and says where the user's layout loses."""

from dataclasses import dataclass

import pytest

from mmtrain.api.plans import compare_layout
from mmtrain.cli.plan_arguments import parse_layout
from mmtrain.errors import PlanError, UserError
from mmtrain.planning import Plan
from mmtrain.planning.advise.why_slower import with_compared
from mmtrain.recipe import Recipe
from tests.planning.factory import lengths, recipe
from tests.plans import plan_recipe


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("tp=8,pp=8,vpp=3", {"tp": 8, "pp": 8, "vpp": 3}),
        ("tp=8 pp=8", {"tp": 8, "pp": 8, "vpp": 1}),
        (
            "--num-layers-per-virtual-pipeline-stage 4 --tensor-model-parallel-size 8 "
            "--pipeline-model-parallel-size=8 --sequence-parallel",
            {"tp": 8, "pp": 8, "vpp": 3, "sp": "true"},
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 20 "
            "--num-virtual-stages-per-pipeline-rank 2 --decoder-last-pipeline-num-layers 24",
            {"pp": 4, "vpp": 2, "layers_per_chunk": [10, 13, 13, 12, 10, 13, 13, 12]},
        ),
        ("pp=2,num_layers_in_first_pipeline_stage=47", {"pp": 2, "vpp": 1, "layers_per_chunk": [47, 49]}),
        ("tensor_model_parallel_size=4,virtual_pipeline_model_parallel_size=2,pp=2", {"tp": 4, "vpp": 2, "pp": 2}),
    ],
)
def test_sizes_and_arguments_of_megatron_are_read(text: str, sizes: dict[str, object]) -> None:
    placement, *settings = parse_layout(text, num_layers=96)
    assert placement == "parallel.placement=unified"
    assert sorted(settings) == sorted(f"parallel.llm.{name}={value}" for name, value in sizes.items())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp=eight", "tp is 'eight'; allowed: a whole number above 0; allowed: 'tp=8,pp=8,vpp=3'"),
        ("tq=8", "'tq' is not known"),
        ("", "nothing is there"),
        ("--context-parallel-size 2", "context_parallel_size is 2; only 1 can be planned"),
        ("pp=3,num_layers_in_first_pipeline_stage=95", "leave 1, which 2 ranks cannot share evenly"),
        ("pp=2,vpp=2,num_layers_in_first_pipeline_stage=47", "[47] layers of a rank do not divide into 2 chunks"),
        ("num_layers_in_first_pipeline_stage=47", "pp is not above 1"),
        ("pp=8,num_layers_per_virtual_pipeline_stage=5", "96 layers of the LLM are no multiple of 5 layers x 8"),
    ],
)
def test_a_layout_that_is_not_understood_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_layout(text, num_layers=96)
    assert problem in str(caught.value)


@dataclass
class Planner:
    """Plans on four ranks, or raises."""

    error: str = ""

    def __call__(self, settings: Recipe) -> Plan:
        if self.error:
            raise PlanError(self.error)
        return plan_recipe(settings, lengths(), world_size=4, hardware="cpu-core", recipe_sha256="b" * 64)


@pytest.fixture(scope="module")
def chosen() -> Plan:
    return plan_recipe(recipe(), lengths(), world_size=4, hardware="cpu-core", recipe_sha256="a" * 64)


def test_the_ranking_holds_the_users_layout_with_the_split_of_its_loss(chosen: Plan) -> None:
    sizes = recipe(parallel={"placement": "unified", "llm": {"tp": 4, "pp": 1, "dp": 1}})
    ranked = compare_layout(chosen, sizes, Planner())
    assert (ranked.recipe_sha256, ranked.placement, ranked.units) == ("a" * 64, chosen.placement, chosen.units)
    [mine] = [other for other in ranked.alternatives if other.summary.startswith("your layout")]
    assert "llm tp4 pp1 dp1" in mine.summary
    assert "x slower: +" in mine.reason
    parts = [part.split(" s ") for part in mine.reason.partition(": ")[2].split(", ")]
    split_s = sum(float(seconds) for seconds, _ in parts)
    assert mine.step_time_s is not None
    assert split_s == pytest.approx(mine.step_time_s - chosen.predicted.step_time_s, rel=0.05)


def test_a_layout_that_the_user_divides_is_not_divided_by_the_planner(chosen: Plan) -> None:
    llm = {"tp": 1, "pp": 2, "dp": 2, "layers_per_chunk": [1, 3]}
    ranked = compare_layout(chosen, recipe(parallel={"placement": "unified", "llm": llm}), Planner())
    assert [other.summary for other in ranked.alternatives if other.summary.startswith("your layout, unified")]


def test_a_layout_that_has_no_plan_is_listed_with_the_reason(chosen: Plan) -> None:
    ranked = compare_layout(chosen, recipe(), Planner("no plan uses\n  exactly 4 ranks"))
    assert ranked.alternatives[-1].reason == "no plan uses exactly 4 ranks"


def test_a_faster_layout_becomes_the_plan(chosen: Plan) -> None:
    faster = chosen.predicted.model_copy(update={"step_time_s": chosen.predicted.step_time_s / 2})
    ranked = with_compared(chosen, chosen.model_copy(update={"predicted": faster}), "your layout")
    assert ranked.predicted == faster
    assert any(other.summary.startswith("the search's plan") for other in ranked.alternatives)
