"""From a recipe to the fastest parallel plan that fits, with the plans it beat and why; imports no torch."""

from mmtrain.plan.files import load, require_match
from mmtrain.plan.graph import stage_graph
from mmtrain.plan.plan import Alternative, Plan, Prediction, SchedulePlan, StagePlan, UnitPlan
from mmtrain.plan.story import plan

__all__ = [
    "Alternative",
    "Plan",
    "Prediction",
    "SchedulePlan",
    "StagePlan",
    "UnitPlan",
    "load",
    "plan",
    "require_match",
    "stage_graph",
]
