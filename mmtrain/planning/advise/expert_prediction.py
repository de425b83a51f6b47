"""Say what unequal loads of experts cost a plan, and what other numbers of ranks that hold them would take."""

import math
from dataclasses import replace

from mmtrain.costs.choose import expert_spread
from mmtrain.costs.expert_spread import fullest_rank_load
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.models.shapes.model_shape import with_expert_spread
from mmtrain.planning.artifact.plan import ExpertPrediction
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import simulate_layout
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.graph import LLM


def predict_experts(chosen: Candidate, evaluator: Evaluator) -> ExpertPrediction | None:
    """Compare the candidate with itself under equal loads; None where no ranks hold experts together.

    Its step is simulated again, with the same layout and program.
    """
    problem = evaluator.problem
    mixtures = [layer.mlp for layer in problem.shape.unit(LLM).layers if isinstance(layer.mlp, MoeMlp)]
    if not mixtures or mixtures[0].ep == 1:
        return None
    even = replace(problem, shape=with_expert_spread(problem.shape, 0.0))
    loads, budget = evaluator.layer_costs.loads, evaluator.budget
    even_costs = with_token_splits(even, LayerCosts(even, budget=budget, loads=loads))
    equal_s = simulate_layout(
        chosen.layout, chosen.schedule, even_costs, problem.hardware, budget.evaluation
    ).step_time_s
    return ExpertPrediction(
        spread=mixtures[0].load_spread,
        source=expert_spread(problem.recipe, problem.costs)[1],
        fullest_rank=fullest_rank_load(mixtures[0]),
        slower=max(0.0, chosen.step_time_s / equal_s - 1),
        steps_s={ep: None if math.isinf(seconds) else seconds for ep, seconds in problem.expert_steps_s.items()},
    )
