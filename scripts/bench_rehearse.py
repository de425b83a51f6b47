"""Compare rehearsed steps with the simulator's prediction, on plans of the shipped recipes.

    python -m scripts.bench_rehearse [RECIPE ...]

Prints a row for each: ranks of the plan and of its replica group, the stretch, the predicted and the rehearsed step,
the error of the prediction (target: 5%), the processor milliseconds of an action, and what this machine was.
"""

import argparse
import os
import platform
import resource
from pathlib import Path

from mmtrain.api.simulated_steps import index_and_plan, step_batches
from mmtrain.planning.evaluate.simulate_plan import plan_timing
from mmtrain.program import build_program
from mmtrain.program.ir.first_group import first_group
from mmtrain.recipe import load_recipe
from mmtrain.runtime.rehearsal.rehearse import RehearsalRequest, rehearse

RECIPES = Path(__file__).parents[1] / "recipes" / "whatif"
DEFAULT_RECIPES = ("internvl_26b", "mmscale_7b", "optimus_14b", "orchmllm_10b")
NUM_STEPS = 3


def main() -> None:
    """Rehearse each recipe and print its row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=DEFAULT_RECIPES, help="names of recipes in recipes/whatif")
    parser.add_argument("--placement", help="plan only this placement")
    parser.add_argument("--ranks-here", type=int, default=64)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    overrides = [f"parallel.placement={arguments.placement}"] if arguments.placement else []
    for name in arguments.recipes:
        recipe = load_recipe(RECIPES / f"{name}.yaml", overrides).recipe
        index, plan = index_and_plan(recipe, None)
        [batch] = step_batches(recipe, index, plan)
        timing = plan_timing(recipe, plan, batch)
        used_s = _processor_s()
        result = rehearse(RehearsalRequest(recipe, plan, timing, NUM_STEPS, max_processes=arguments.ranks_here))
        order = plan.schedule.order
        group = first_group(timing.graph)
        program = build_program(
            group.graph, kind=plan.schedule.kind, order=None if order is None else group.renumber(order)
        )
        num_actions = NUM_STEPS * sum(map(len, program.actions.values()))
        action_ms = (_processor_s() - used_s) / num_actions * 1e3
        mean_s = sum(result.steps_s) / len(result.steps_s)
        print(
            f"{name}: {plan.placement}, {len(result.ranks)} of {plan.world_size} ranks, stretch {result.stretch:.3g}, "
            f"predicted {result.predicted_s:.4g} s, rehearsed {mean_s:.4g} s, prediction off by {result.error:+.2%}, "
            f"{action_ms:.2f} processor ms an action with the start of its rank"
        )


def _processor_s() -> float:
    """Return the processor seconds of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
