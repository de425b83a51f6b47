"""How a plan that was made during a run refers to the plan that the run had."""

from mmtrain.planning.artifact.layout import Layout
from mmtrain.planning.artifact.plan import Alternative, Plan

PRESENT_PLAN_REASON = "the plan of the run so far"


def with_present(plan: Plan, present: Plan, present_s: float) -> Plan:
    """Return a plan with the run's present one as its first alternative, predicted with the same costs."""
    peak_gib = max(present.predicted.peak_memory_gib.values(), default=None)
    alternative = Alternative(
        summary=plan_layout(present).summary,
        placement=present.placement,
        step_time_s=present_s,
        peak_memory_gib=peak_gib,
        reason=PRESENT_PLAN_REASON,
    )
    return plan.model_copy(update={"alternatives": (alternative, *plan.alternatives)})


def present_step_s(plan: Plan) -> float:
    """Return the predicted step time of the plan that the run had, by the costs that this one was made with."""
    present = plan.alternatives[0]
    assert present.reason == PRESENT_PLAN_REASON, "a plan from `with_present`"
    assert present.step_time_s is not None
    return present.step_time_s


def plan_layout(plan: Plan) -> Layout:
    """Return the layout of a plan."""
    is_encoder_first = plan.schedule.kind == "encoder_first"
    return Layout(plan.placement, plan.units, plan.schedule.num_microbatches, is_encoder_first)
