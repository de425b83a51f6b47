"""What a step's MFU counts, and that one rank alone brings its measurements to no device."""

from functools import reduce
from operator import add

import torch

from mmtrain.costs import model_flops
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.program import step_loads
from mmtrain.runtime.training.step_metrics import counted_flops, gather_measurements
from mmtrain.runtime.world import World
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


def test_one_rank_copies_its_measurements_nowhere() -> None:
    """A wait for the device beside that for the loss; on torch's meta device the copy back is an error."""
    table = gather_measurements(World(0, 1, torch.device("meta")), [1.0, 2.5])
    assert (table.tolist(), table.dtype, table.device) == ([[1.0, 2.5]], torch.float64, torch.device("cpu"))
