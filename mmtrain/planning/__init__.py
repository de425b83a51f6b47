"""From a recipe to the fastest parallel plan that fits, with the plans it beat and why; imports no torch.

This front exports the plan file and what follows from it. The search is `mmtrain.planning.planner.plan`; only those who
search import it, so that ranks that execute a plan never load it.
"""

from mmtrain.planning.artifact.plan import Alternative, Plan, Prediction, SchedulePlan, StagePlan, UnitPlan
from mmtrain.planning.artifact.plan_files import load_plan, require_match
from mmtrain.planning.artifact.plan_graph import stage_graph

__all__ = [
    "Alternative",
    "Plan",
    "Prediction",
    "SchedulePlan",
    "StagePlan",
    "UnitPlan",
    "load_plan",
    "require_match",
    "stage_graph",
]
