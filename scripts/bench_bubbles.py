"""Measure what each step of bubble scheduling gains: encoders around the LLM, layers in bubbles, pieces in TP bubbles.

    python -m scripts.bench_bubbles                                # a layout of each what-if recipe below
    python -m scripts.bench_bubbles internvl_26b 8,1,8,1 8,1,8,1   # tp,pp,dp,vpp of vision and of the LLM

Steps are simulated on the sampled batches of the recipe; `T` is the step of the LLM alone. Shares are those of the
encoders' compute inside the LLM's own step. Seconds are processor time to plan and simulate that order.
"""

import sys
import time
from pathlib import Path

from mmtrain.balance import Grouping
from mmtrain.cli.recipe_index import index_recipe
from mmtrain.costs import costs_for, machine_for, precision_for
from mmtrain.models.model_shape import build_model_shape as model_shape
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.artifact.plan import SchedulePlan
from mmtrain.plan.artifact.plan_graph import split_into_pieces
from mmtrain.plan.colocated.colocated_layouts import colocated_layout
from mmtrain.plan.colocated.encoder_order import plan_encoder_order, scheduling_efficiency
from mmtrain.plan.colocated.llm_alone import simulate_llm_alone
from mmtrain.plan.estimate.evaluate import evaluate_layout
from mmtrain.plan.estimate.layer_costs import LayerCosts
from mmtrain.plan.estimate.sample_batches import sample_batches
from mmtrain.plan.search.constraints import encoder_microbatches, unit_choices
from mmtrain.plan.search.layer_partition import layout_graph
from mmtrain.plan.search.sequence_parallel import with_sequence_parallelism
from mmtrain.recipe import load_recipe

LAYOUTS = (
    ("optimus_14b", "1,1,8,1", "8,1,1,1"),
    ("optimus_14b", "8,1,1,1", "8,1,1,1"),
    ("internvl_26b", "8,1,8,1", "8,1,8,1"),
    ("optimus_197b", "8,8,48,1", "8,8,48,4"),
)


def main() -> None:
    """Print a table row for each layout."""
    print("recipe, vision, LLM | T | coarse | layers | pieces (step s, share inside T, seconds to plan)")
    for name, encoder, llm in [tuple(sys.argv[1:4])] if len(sys.argv) > 1 else LAYOUTS:
        print(table_row(name, parse_mesh(encoder), parse_mesh(llm)), flush=True)


def table_row(name: str, encoder: MeshSize, llm: MeshSize) -> str:
    """Return the row of one layout under the three schedules."""
    recipe = load_recipe(Path(f"recipes/whatif/{name}.yaml")).recipe
    machine, shape = machine_for(recipe, recipe.cluster.hardware), model_shape(recipe)
    precision, choices = precision_for(recipe, machine), unit_choices(recipe, shape, machine.ranks_per_node)
    layer_costs = LayerCosts(
        shape,
        costs_for(machine, precision, recipe.cluster.costs),
        precision,
        sample_batches(
            index_recipe(recipe).lengths, Grouping.of(recipe.data, recipe.train.global_batch), recipe.train.seed
        ),
        recipe.data.seq_len,
        {unit: getattr(recipe.parallel, unit).recompute for unit in choices},
        encoder_microbatches(recipe, shape),
    )
    layer_costs = with_sequence_parallelism(
        layer_costs, {unit: getattr(recipe.parallel, unit).sp for unit in choices}, choices, machine
    )
    layout = colocated_layout(layer_costs, {"vision": encoder}, llm)
    assert layout is not None, "there are enough layers"
    counts = dict(layout.num_microbatches)
    by_layer = layout_graph(layout, layer_costs)
    with_sp = [mesh.unit for mesh in by_layer.meshes if layer_costs.has_sp(mesh.unit, mesh.tp)]
    by_piece = split_into_pieces(by_layer, shape, with_sp)
    cells = [f"{name}, {encoder}, {llm} | {simulate_llm_alone(by_layer, layer_costs, machine).step_time_s:.3f}"]
    for graph in (None, by_layer, by_piece):
        start = time.process_time()
        schedule = SchedulePlan(kind="coarse", num_microbatches=counts)
        if graph is not None:
            order = plan_encoder_order(graph, layer_costs, machine)
            schedule = SchedulePlan(kind="explicit", num_microbatches=counts, order=order, pieces=graph is by_piece)
        candidate = evaluate_layout(layout, layer_costs, machine, schedule)
        seconds = time.process_time() - start
        share = scheduling_efficiency(candidate, layer_costs, machine) or 0.0
        cells.append(f"{candidate.step_time_s:.3f}, {share:.0%}, {seconds:.1f}")
    return " | ".join(cells)


def parse_mesh(text: str) -> MeshSize:
    """Return the mesh that `tp,pp,dp,vpp` states."""
    tp, pp, dp, vpp = map(int, text.split(","))
    return MeshSize(tp, pp, dp, vpp)


if __name__ == "__main__":
    main()
