"""Measure what each step of bubble scheduling gains: encoders around the LLM, layers in bubbles, pieces in TP bubbles.

    python -m scripts.bench_bubbles                                # a layout of each what-if recipe below
    python -m scripts.bench_bubbles internvl_26b 8,1,8,1 8,1,8,1   # tp,pp,dp,vpp of vision and of the LLM

Steps are simulated on the sampled batches of the recipe; `T` is the step of the LLM alone. Shares are those of the
encoders' compute inside the LLM's own step. Seconds are processor time to plan and simulate that order.
"""

import sys
import time

from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.colocated.colocated_layouts import colocated_layout
from mmtrain.planning.colocated.encoder_order import plan_encoder_order, scheduling_efficiency
from mmtrain.planning.colocated.llm_alone import simulate_llm_alone
from mmtrain.planning.evaluate.layout_simulation import scheduled_graph, simulate_layout
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from scripts.whatif_problems import whatif_problem

LAYOUTS = (
    ("optimus_14b", "1,1,8,1", "8,1,1,1"),
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
    problem = whatif_problem(name, world_size=llm.ranks)
    layer_costs = with_token_splits(problem, LayerCosts(problem))
    layout = colocated_layout(layer_costs, {"vision": encoder}, llm)
    machine = problem.hardware
    assert layout is not None, "the layers are too few for this mesh"
    num_microbatches = dict(layout.num_microbatches)
    coarse = SchedulePlan(kind="coarse", num_microbatches=num_microbatches)
    in_pieces = SchedulePlan(kind="explicit", num_microbatches=num_microbatches, order={}, pieces=True)
    llm_alone = simulate_llm_alone(scheduled_graph(layout, coarse, layer_costs), layer_costs, machine)
    columns = [f"{name}, {encoder}, {llm} | {llm_alone.step_time_s:.3f}"]
    for schedule in (coarse, in_pieces.model_copy(update={"pieces": False}), in_pieces):
        start = time.process_time()
        if schedule.kind == "explicit":
            order = plan_encoder_order(scheduled_graph(layout, schedule, layer_costs), layer_costs, machine)
            schedule = schedule.model_copy(update={"order": order})
        simulation = simulate_layout(layout, schedule, layer_costs, machine)
        seconds = time.process_time() - start
        share = scheduling_efficiency(simulation.graph, schedule, layer_costs, machine) or 0.0
        columns.append(f"{simulation.step_time_s:.3f}, {share:.0%}, {seconds:.1f}")
    return " | ".join(columns)


def parse_mesh(text: str) -> MeshSize:
    """Return the mesh that `tp,pp,dp,vpp` states."""
    tp, pp, dp, vpp = map(int, text.split(","))
    return MeshSize(tp, pp, dp, vpp)


if __name__ == "__main__":
    main()
