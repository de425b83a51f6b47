"""Measure what unequal shares of microbatches would bring to colocated plans of recipes.

    python -m scripts.bench_shares [optimus_14b optimus_186b ...]

Optimus (arXiv 2408.03505, section 4.2) gives each of the m encoder pipelines on an LLM replica a number of microbatches
of its own, N_1 to N_m, and lets the i-th forward to end become LLM microbatch i. A recipe's plan gives each pipeline
one of every m LLM microbatches, all due with the first of them. Here the bubble scheduler places the encoder of the
fastest colocated layouts with m > 1 in four ways: as in a plan; with each forward due for its own LLM microbatch; also
renumbered; and with the best shares. Seconds are those of the scheduler: on mean microbatches, without messages, and
with nothing recomputed.
"""

from dataclasses import replace

import numpy as np

from mmtrain.planning.artifact.layout import Layout, MeshSize
from mmtrain.planning.artifact.plan import SchedulePlan
from mmtrain.planning.colocated.bubble_schedule import EncoderPlan, LlmTimeline, schedule_encoder
from mmtrain.planning.colocated.colocated_layouts import colocated_layout
from mmtrain.planning.colocated.colocated_search import search_colocated
from mmtrain.planning.colocated.llm_alone import find_bubbles, simulate_llm_alone, with_delayed_forwards
from mmtrain.planning.colocated.stage_kernels import GraphSegments, stage_kernels
from mmtrain.planning.evaluate.evaluator import Evaluator
from mmtrain.planning.evaluate.layout_simulation import scheduled_graph
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.planning.layer_costs.token_splits import with_token_splits
from mmtrain.planning.space.candidate import Candidate
from mmtrain.program.ir.graph import LLM
from scripts.kernel_tables.encoder_search import search_shares, step_time_lower_bound
from scripts.measurements import arguments, start
from scripts.whatif_problems import whatif_problem

RECIPES = ("optimus_14b", "optimus_186b", "optimus_197b")
MAX_LAYOUTS = 6  # of each recipe, the fastest with several encoder pipelines on an LLM replica


def main() -> None:
    """Print a table for each recipe."""
    parser = arguments(__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES)
    options = parser.parse_args()
    report = start("Unequal shares of microbatches", options)
    steps = "plan", "LLM", "blocks", "own deadlines", "renumbered", "best shares", "bound"
    for name in options.recipes:
        problem = whatif_problem(name)
        evaluator = Evaluator(problem, layer_costs=with_token_splits(problem, LayerCosts(problem)))
        report.table(f"{name}: layout", "m", *steps, "shares")
        shown: list[str] = []
        candidates = search_colocated(evaluator, problem.cluster.num_ranks).candidates
        for candidate in sorted(candidates, key=lambda candidate: candidate.step_time_s):
            meshes = candidate.assignment.meshes
            key = ", ".join(f"{unit} {mesh}" for unit, mesh in meshes.items())
            if meshes["vision"].dp > meshes[LLM].dp and key not in shown and len(shown) < MAX_LAYOUTS:
                shown.append(key)
                report.row(key, *cells(candidate, evaluator))
        report.line()


def cells(candidate: Candidate, evaluator: Evaluator) -> list[str]:
    """Return the cells of a candidate."""
    meshes = candidate.assignment.meshes
    num_llm = candidate.assignment.num_microbatches[LLM]
    m = meshes["vision"].dp // meshes[LLM].dp
    if num_llm % m:
        return [f"{m}: {num_llm} LLM microbatches cannot be shared out evenly"]
    llm, plan = scheduled_problem(candidate.layout, evaluator, num_llm // m)
    blocks = replace(
        llm,
        first_forwards=llm.first_forwards.reshape(-1, m).min(axis=1).repeat(m),
        last_backwards=llm.last_backwards.reshape(-1, m).max(axis=1).repeat(m),
    )
    in_turn = np.arange(num_llm) % m
    best = search_shares(llm, plan)
    columns = [
        candidate.step_time_s,
        llm.step_time,
        schedule_encoder(blocks, plan, in_turn).step_time,
        schedule_encoder(llm, plan, in_turn).step_time,
        schedule_encoder(llm, plan, in_turn, renumber=True).step_time,
        best.step_time,
        step_time_lower_bound(llm, plan),
    ]
    shares = " ".join(map(str, np.bincount(best.owner, minlength=m)))
    return [str(m), *(f"{seconds:.4f}" for seconds in columns), shares]


def scheduled_problem(layout: Layout, evaluator: Evaluator, num_encoder: int) -> tuple[LlmTimeline, EncoderPlan]:
    """Return the LLM's timeline, and the encoder with `num_encoder` microbatches, as plans in pieces place it."""
    layer_costs, hardware = evaluator.layer_costs, evaluator.problem.hardware
    sizes = {name: MeshSize(unit.tp, unit.pp, unit.dp, unit.vpp) for name, unit in layout.units.items()}
    llm_size = sizes.pop(LLM)
    counts = {**dict(layout.num_microbatches), "vision": num_encoder}
    changed = colocated_layout(layer_costs, sizes, llm_size, None, counts)
    assert changed is not None, "only the number of microbatches changed"
    schedule = SchedulePlan(kind="explicit", num_microbatches=counts, order={}, pieces=True)
    graph = scheduled_graph(changed, schedule, layer_costs)
    segments = GraphSegments.of(graph, layer_costs)
    costs, max_kernel_s = segments.costs, segments.max_kernel_s
    alone = simulate_llm_alone(graph, layer_costs, hardware)
    llm = find_bubbles(graph, alone, with_delayed_forwards(graph, alone), segments.gaps)
    stages = [stage.id for stage in graph.stages if stage.id.unit == "vision"]
    plan = EncoderPlan(
        tp=sizes["vision"].tp,
        pp=sizes["vision"].pp,
        tp_groups_per_rank=llm_size.tp // sizes["vision"].tp,
        forward=tuple((stage_kernels(costs[stage, "F"], "F", max_kernel_s).kernels,) for stage in stages),
        backward=tuple((stage_kernels(costs[stage, "B"], "B", max_kernel_s).kernels,) for stage in stages),
    )
    return llm, plan


if __name__ == "__main__":
    main()
