"""What each step of the bubble schedule gains: encoders around the LLM, their layers, and pieces of layers in it.

    python -m scripts.bench_bubbles                                # a layout of each what-if recipe below
    python -m scripts.bench_bubbles internvl_26b 8,1,8,1 8,1,8,1   # tp,pp,dp,vpp of vision and of the LLM

Steps are simulated on the drawn batches of the recipe; `T` is the LLM by itself. Shares are of the encoders' compute
that lies inside the LLM's own step. Seconds are those of this process, for orders and simulations of that step alone.
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
        print(row(name, size(encoder), size(llm)), flush=True)


def row(name: str, encoder: MeshSize, llm: MeshSize) -> str:
    """One layout under the three schedules."""
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
    assert layout is not None, "there are layers enough"
    counts, whole = dict(layout.num_microbatches), layout_graph(layout, layer_costs)
    pieces = split_into_pieces(whole, shape, [m.unit for m in whole.meshes if layer_costs.has_sp(m.unit, m.tp)])
    told = [f"{name}, {encoder}, {llm} | {simulate_llm_alone(whole, layer_costs, machine).step_time_s:.3f}"]
    for graph in (None, whole, pieces):
        begin = time.process_time()
        schedule = SchedulePlan(kind="coarse", num_microbatches=counts)
        if graph is not None:
            order = plan_encoder_order(graph, layer_costs, machine)
            schedule = SchedulePlan(kind="explicit", num_microbatches=counts, order=order, pieces=graph is pieces)
        found = evaluate_layout(layout, layer_costs, machine, schedule)
        took = time.process_time() - begin
        share = scheduling_efficiency(found, layer_costs, machine) or 0.0
        told.append(f"{found.step_time_s:.3f}, {share:.0%}, {took:.1f}")
    return " | ".join(told)


def size(text: str) -> MeshSize:
    """A mesh from `tp,pp,dp,vpp`."""
    tp, pp, dp, vpp = map(int, text.split(","))
    return MeshSize(tp, pp, dp, vpp)


if __name__ == "__main__":
    main()
