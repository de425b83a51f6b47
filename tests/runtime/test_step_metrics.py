"""What a step's MFU counts."""

from functools import reduce
from operator import add

from mmtrain.costs import model_flops
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import step_loads
from mmtrain.runtime.training.step_metrics import counted_flops
from tests.flow.cases import SAMPLES, Mesh, batch, plan, recipe


def test_a_run_counts_the_flops_that_its_plan_counts() -> None:
    """Above all, both count the head for tokens with a target alone."""
    settings = recipe()
    shape = build_model_shape(settings)
    graph = stage_graph(plan(settings, vision=Mesh((), (0,)), llm=Mesh((), (0,))), shape)
    meta = batch(0, SAMPLES, {"vision": 1, "llm": 1}, {"vision": 4, "llm": 4})
    loads = step_loads(graph, meta).loads
    totals = {unit: reduce(add, [load for mb, load in loads.items() if mb.unit == unit]) for unit in ("vision", "llm")}
    assert totals["llm"].num_targets == meta.total_targets < meta.tokens.sum()
    assert counted_flops(shape, meta) == model_flops(shape, totals)
