"""The simulated step of a saved plan on a given batch: what a run would measure if the costs are right."""

from mmtrain.balance import BatchMeta
from mmtrain.costs import costs_for, input_grad_needed, machine_with_spread, num_trained_parameters
from mmtrain.costs.hardware import ELEMENT_BYTES
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import planned_shape, stage_graph
from mmtrain.program import ModelTiming, Timeline, build_program, simulate, step_loads
from mmtrain.recipe.settings.schema import Recipe


def simulate_plan(recipe: Recipe, plan: Plan, batch: BatchMeta) -> Timeline:
    """Simulate one step of the plan, with all replica groups, on a batch that is laid out for it."""
    timing = plan_timing(recipe, plan, batch)
    program = build_program(timing.graph, kind=plan.schedule.kind, order=plan.schedule.order)
    return simulate(program, timing, timing.graph.num_groups, timing.waits)


def plan_timing(recipe: Recipe, plan: Plan, batch: BatchMeta) -> ModelTiming:
    """Return what every action of the plan takes in a step with this batch."""
    machine = machine_with_spread(recipe, plan.hardware).at_pace_of(plan.world_size)
    model = planned_shape(plan, build_model_shape(recipe))
    graph = stage_graph(plan, model)
    return ModelTiming(
        graph,
        model,
        costs_for(machine, plan.precision, recipe.cluster.costs),
        step_loads(graph, batch),
        input_grad_needed(model),
        num_trained_parameters,
        ELEMENT_BYTES[plan.precision],
        machine.ranks_per_node,
        machine.overlap_slowdown,
        machine.rail_hop_s,
        machine.time_spread,
        machine.slowest_rank_ratio,
        recipe.train.grad_reduce,
        recipe.train.optimizer.kind == "muon",
    )
