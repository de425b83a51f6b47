"""What the LLM would reach without media: the yardstick for the share of text-only efficiency that a plan keeps."""

from mmtrain.balance import SampleLengths
from mmtrain.errors import UserError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import search_placements
from mmtrain.planning.space.budget import QUICK_BUDGET
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.parallel_settings import ParallelSettings
from mmtrain.recipe.settings.schema import Recipe


def with_text_only(plan: Plan, recipe: Recipe, lengths: SampleLengths) -> Plan:
    """Return the plan with the throughput of its LLM alone: same tokens, same ranks, sizes free.

    Unchanged for a model without encoders, for one whose LLM does not train, and where the LLM alone has no plan.
    """
    is_trained = any(layer.trainable for layer in build_model_shape(recipe).unit(LLM).layers)
    if len(plan.units) == 1 or "generator" in plan.units or not is_trained:
        return plan
    model = recipe.model.model_copy(update={"vision": None, "audio": None, "encoders": {}})
    of_llm = recipe.parallel.llm.model_dump(include={"recompute", "sp", "tp_overlap"})
    parallel = ParallelSettings.model_validate({"llm": of_llm})
    problem_recipe = recipe.model_copy(update={"model": model, "parallel": parallel})
    try:
        problem = formulate_problem(
            problem_recipe,
            SampleLengths(lengths.tokens, lengths.targets, {}),
            world_size=plan.world_size,
            hardware=plan.hardware,
            recipe_sha256=plan.recipe_sha256,
            request=PlanRequest(num_alternatives=0),
        )
        if not problem.cluster.rank_counts:
            return plan
        evaluator, results = search_placements(problem, QUICK_BUDGET)
    except UserError:  # patterns or sizes that need an encoder, or nothing fits
        return plan
    tokens_per_s = evaluator.layer_costs.tokens() / results.fastest_s / plan.world_size
    predicted = plan.predicted.model_copy(update={"text_only_tokens_per_s_per_gpu": tokens_per_s})
    return plan.model_copy(update={"predicted": predicted})
