"""A unit after the LLM is costed, bounded, checked and simulated like the others."""

from dataclasses import replace

import numpy as np
import pytest

from mmtrain.balance import ItemLengths, SampleLengths
from mmtrain.costs import input_grad_needed
from mmtrain.models.shapes.model_shape import ModelEdge, ModelShape, UnitShape, build_model_shape
from mmtrain.planning.artifact.layout import Layout, MeshSize, disaggregated_units
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.layer_partition import chain_time_lower_bound, layout_graph
from mmtrain.planning.space.candidate import MeshAssignment
from mmtrain.planning.space.sample_batches import SampledBatches
from mmtrain.program import build_program
from mmtrain.program.ir.graph import StageId
from tests.planning.factory import problem_for, recipe, simulated


def with_generator(model: ModelShape, freeze: tuple[str, ...] = ()) -> ModelShape:
    """Make a model whose generator has the encoder's layers; the units named in `freeze` do not train."""
    units = (*model.units, replace(model.unit("vision"), name="generator"))
    edge = ModelEdge("llm", "generator", layer=0, width=model.unit("llm").layers[0].out)
    return ModelShape(tuple(_frozen(u) if u.name in freeze else u for u in units), (*model.edges, edge))


def _frozen(unit: UnitShape) -> UnitShape:
    return replace(unit, layers=tuple(replace(layer, trainable=False) for layer in unit.layers))


def with_images_to_generate(lengths: SampleLengths) -> SampleLengths:
    """Give every other sample an image of four patches to generate."""
    first = np.arange(len(lengths) + 1, dtype=np.int64) // 2
    twos = np.full(first[-1], 2, dtype=np.int64)
    return replace(lengths, items={**lengths.items, "generator": ItemLengths(first, twos, twos, 2 * twos, twos // 2)})


@pytest.mark.parametrize("num_microbatches", [2, 8, 16])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_unit_after_the_llm_is_estimated_and_simulated_like_any_other(pp: int, num_microbatches: int) -> None:
    problem = problem_for(recipe())
    constraints = replace(
        problem.constraints,
        choices={**problem.choices, "generator": problem.choices["vision"]},
        recompute={**problem.constraints.recompute, "generator": "none"},
        encoder_microbatches={"generator": num_microbatches},
    )
    problem = replace(
        problem,
        shape=with_generator(problem.shape),
        batches=SampledBatches(with_images_to_generate(problem.batches.lengths), problem.batches.groups),
        constraints=constraints,
    )
    evaluator = Evaluator(problem)
    layer_costs = evaluator.layer_costs
    sizes = {"vision": MeshSize(1, 1, 1), "llm": MeshSize(1, pp, 1), "generator": MeshSize(1, 2, 1)}
    cuts = {"vision": (0, 5), "llm": (0, 3, 6) if pp == 2 else (0, 6), "generator": (0, 2, 5)}
    counts = {"vision": 8, "llm": 8, "generator": num_microbatches}
    layout = Layout("disaggregated", disaggregated_units(sizes, cuts), counts)
    graph = layout_graph(layout, layer_costs)
    assert [str(s.id) for s in graph.stages if graph.has_loss(s.id)] == [f"llm.{pp - 1}", "generator.1"]
    build_program(graph)
    assignment = MeshAssignment("disaggregated", sizes, counts)
    chains = evaluator.layer_chains(evaluator.enumerated(assignment))
    [estimate_s] = evaluator.estimator(None).estimate(assignment, chains, [tuple(cuts.values())], [None] * 3)
    candidate = simulated(layout, evaluator)
    slack = 1 + 1e-9
    assert 0 < max(map(chain_time_lower_bound, chains)) <= estimate_s * slack
    assert estimate_s <= candidate.step_time_s * slack
    assert set(candidate.memory) == set(range(3 + pp))
    loads = layer_costs.loads.of_step(assignment.batch_split, 0)
    assert sum(rows for mb, rows in loads.rows_out.items() if mb.unit == "llm") > 0


def test_gradients_pass_through_a_frozen_llm_where_an_encoder_trains() -> None:
    model = build_model_shape(recipe())
    assert all(input_grad_needed(with_generator(model, ("llm",)))["generator"])
    assert not input_grad_needed(with_generator(model, ("vision", "llm", "generator")))["generator"][-1]
    graph = layout_graph(_layout(), LayerCosts(replace(problem_for(recipe()), shape=with_generator(model, ("llm",)))))
    assert graph.needs_backward(StageId("generator", 0))


def _layout() -> Layout:
    sizes = dict.fromkeys(("vision", "llm", "generator"), MeshSize(1, 1, 1))
    cuts = {"vision": (0, 5), "llm": (0, 6), "generator": (0, 5)}
    return Layout("disaggregated", disaggregated_units(sizes, cuts), dict.fromkeys(sizes, 8))
