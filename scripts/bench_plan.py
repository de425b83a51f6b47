"""The planner: exactness against trying everything, against a mixed-integer program, and seconds of planning.

    python -m scripts.bench_plan                    # all but the measured part; processor seconds, one core
    python -m scripts.bench_plan --only exact       # or: larger, milp; --first 5 --instances 5 for some of them
    python -m scripts.bench_plan --only sizes       # seconds of the command by number of GPUs
    python -m scripts.bench_plan --only recipes     # its seconds and peak memory on every shipped recipe; --recipe NAME
    python -m scripts.bench_plan --only measured    # runs plans of three tiny models on two ranks here, for minutes

`exact`, `larger` and `milp` need the tools of the tests, so run it from the root of a checkout.
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mmtrain.planning import Plan
from mmtrain.planning.space.candidate import EQUAL_STEP_TIME_RATIO
from mmtrain.recipe import load_recipe
from scripts.measurements import ChildRun, Report, arguments, run_child, set_options, start
from scripts.whatif_problems import WHAT_IF_FOLDER
from tests.planning.exhaustive import (
    Instance,
    by_placement,
    fastest_found,
    larger_instance,
    least_step,
    random_instance,
)
from tests.planning.milp import pipeline, solve

# Ranks, global batch, and GiB of a rank where it is not the hardware's; the first is what the others are compared with.
SIZES = (
    (16, 128, None),
    (7, 128, None),
    (8, 128, None),
    (13, 128, None),
    (16, 64, None),
    (16, 61, None),
    (16, 128, 4),
    (64, 128, None),
    (97, 128, None),
    (256, 256, None),
    (1024, 1024, None),
)
RECIPE_FOLDER = WHAT_IF_FOLDER.parent
SHIPPED_RECIPES = sorted(RECIPE_FOLDER.rglob("*.yaml"))
CLOSE = 1.01  # of the best: how far the search may be behind where it does not try everything


def main() -> None:
    """Print the parts named by `--only`, or all but the measured one."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("exact", "larger", "milp", "sizes", "recipes", "measured"))
    parser.add_argument("--first", type=int, default=0, help="number of the first random instance")
    parser.add_argument("--instances", type=int, help="random instances: of `exact` 200, of `larger` 20")
    parser.add_argument("--recipe", default="", help="of `recipes`: those whose path holds this, like `whatif/papers`")
    parser.add_argument("--model", help="of `measured`, this one alone, like `audio + llm`")
    parser.add_argument("--rounds", type=int, default=15, help="of `measured`: steps of each plan")
    parser.add_argument("--costs", type=Path, default=Path("cpu-core"), help="of `measured`: the table to plan by")
    parser.add_argument("--profile", action="store_true", help="of `measured`: measure layers and plan by that instead")
    parser.add_argument("--folder", type=Path, help="of `measured`: keeps data and cost tables, and uses what is there")
    options = parser.parse_args()
    report = start("Planning", options)
    first = options.first
    parts: dict[str, Callable[[], None]] = {
        "exact": lambda: exact(report, range(first, first + (options.instances or 200))),
        "larger": lambda: larger(report, range(first, first + (options.instances or 20))),
        "milp": lambda: against_milp(report),
        "sizes": lambda: sizes(report),
        "recipes": lambda: recipes(report, options.recipe),
    }
    if options.only == "measured":
        from scripts.bench_ranking import ranking  # imports torch

        ranking(report, options.model, options.folder, None if options.profile else options.costs, options.rounds)
    for name, part in parts.items():
        if options.only in (None, name):
            part()
            report.line()


def exact(report: Report, seeds: range) -> None:
    """Print how often the search finds the optimum of exhaustive simulation: overall, per placement."""
    start_s = time.process_time()
    ratios = [_over_the_best(random_instance(seed)) for seed in _with_progress(20, seeds)]
    equal = sum(max(of_instance) <= EQUAL_STEP_TIME_RATIO for of_instance in ratios)
    report.targets()
    report.target("random instances as fast as the best of everything", equal, len(seeds), at_least=True)
    report.figure("the worst of them", f"{max(map(max, ratios)):.4f}x")
    report.figure("processor seconds", f"{time.process_time() - start_s:.0f}")


def larger(report: Report, seeds: range) -> None:
    """Print how far the search is from the optimum where it does not try everything."""
    near = {"together": 0, "each": 0}
    report.table("instance", "plans", "ranks", "over the best: of all, of each placement", "seconds")
    for seed in seeds:
        instance = larger_instance(seed)
        start_s = time.process_time()
        ratios = _over_the_best(instance)
        near["together"] += ratios[0] <= CLOSE
        near["each"] += max(ratios) <= CLOSE
        ranks = f"{instance.candidates[0].assignment.ranks} {instance.evaluator.problem.hardware.name}"
        over = ", ".join(f"{ratio:.4f}" for ratio in ratios)
        report.row(seed, instance.num_partitions, ranks, over, f"{time.process_time() - start_s:.0f}")
    report.line()
    report.targets()
    within = f"within {CLOSE - 1:.0%} of the best of everything"
    report.target(f"all placements together {within}", near["together"], len(seeds), at_least=True)
    report.target(f"each placement by itself {within}", near["each"], len(seeds), at_least=True)


def _over_the_best(full_instance: Instance) -> list[float]:
    """Return the step time found over that of the best: of all plans, then of each placement."""
    best = [least_step(apart) for apart in by_placement(full_instance)]
    best_by_instance = [(full_instance, min(best)), *zip(by_placement(full_instance), best, strict=True)]
    return [fastest_found(instance) / best_s for instance, best_s in best_by_instance if math.isfinite(best_s)]


def _with_progress(number: int, seeds: range) -> Iterator[int]:
    for num_done, seed in enumerate(seeds):
        if num_done and num_done % number == 0:
            print(f"  {num_done} of {len(seeds)}", flush=True)
        yield seed


def against_milp(report: Report) -> None:
    """Print the simulated step of the planner's partition over that of the MILP, and the seconds of both."""
    report.table("one encoder, 1F1B, memory for 0.7 of what no recompute takes", "over the MILP", "s", "MILP s")
    for vision, llm, pp, batch in ((3, 5, 3, 8), (6, 9, 4, 16), (44, 78, 8, 32)):
        instance = pipeline(vision, llm, pp, batch, share=0.7)
        start_s = time.process_time()
        ours = instance.planned()
        seconds, start_s = time.process_time() - start_s, time.process_time()
        solved = solve(instance.chain, instance.num_in_flight, instance.memory_bytes)
        milp_seconds = time.process_time() - start_s
        ratio = "the MILP found nothing in 60 s"
        if solved is not None and (reference := instance.simulated(solved.partition)) is not None:
            ratio = f"{ours / reference:.4f}{'' if solved.is_proven else ' (unproven, 60 s)'}"
        model = f"{vision + 2}+{llm + 2} layers, PP {pp}, {batch} microbatches"
        report.row(model, ratio, f"{seconds:.2f}", f"{milp_seconds:.1f}")


def sizes(report: Report) -> None:
    """Print the seconds of `mmtrain plan` by number of GPUs, odd ones too.

    They include imports, data, the LLM alone, hints and the proof. Processor seconds hardly depend on what else runs.
    """
    columns = "processor s", "by the clock", "to the first row", "plan", "predicted step"
    report.table("model, ranks and global batch", *columns)
    normal_s = 0.0
    for ranks, batch, memory_gib in SIZES:
        changes = [f"train.global_batch={batch}", "cluster.hardware=h100-80g", f"cluster.ranks={ranks}"]
        name = f"7B on {ranks:,}, batch {batch:,}"
        if memory_gib is not None:
            changes.append(f"cluster.memory_gib={memory_gib}")
            name = f"7B on {ranks:,} of {memory_gib} GiB, batch {batch:,}"
        row_arguments = [str(WHAT_IF_FOLDER / "qwen2_vl_7b.yaml"), *set_options(changes)]
        normal_s = _write_row(report, name, row_arguments, normal_s) or normal_s
    _write_row(report, "197B on 3,072, batch 1,536", [str(WHAT_IF_FOLDER / "optimus_197b.yaml")], normal_s)


def _write_row(report: Report, name: str, options: list[str], normal_s: float) -> float | None:
    """Plan once and write the row; return its processor seconds if it is the first, which others are compared with."""
    used, found = _plan(options)
    ratio = f"{used.processor_s / normal_s:.1f}" if normal_s else "1"
    report.row(name, f"{used.processor_s:.1f}", f"{used.clock_s:.0f}", ratio, *found)
    return None if normal_s else used.processor_s


def recipes(report: Report, part_of_path: str) -> None:
    """Print what planning each shipped recipe takes; those whose data is missing here are left out.

    The first row is the least that any plan takes: imports and a tiny model.
    """
    report.table("recipe", "processor s", "peak GB", "plan", "predicted step")
    for path in SHIPPED_RECIPES:
        name = str(path.relative_to(RECIPE_FOLDER))
        if part_of_path not in name or not _has_data(path):
            continue
        used, found = _plan([str(path)])
        report.row(name, f"{used.processor_s:.1f}", f"{used.peak_bytes / 1e9:.2f}", *found)


def _has_data(path: Path) -> bool:
    sources = load_recipe(path).recipe.data.sources
    return all(Path(str(source.path)).exists() for source in sources)


def _plan(options: list[str]) -> tuple[ChildRun, list[str]]:
    """Run `mmtrain plan`; return what it used, and what it found, in words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        used = run_child([sys.executable, "-m", "mmtrain", "plan", *options, "--out", str(path)])
        if used.exit_code != 0:
            return used, ["none fits", ""]
        chosen = Plan.model_validate_json(path.read_text(encoding="utf-8"))
    llm, step_s = chosen.units["llm"], chosen.predicted.step_time_s
    mesh = f"{chosen.placement}, LLM tp{llm.tp} pp{llm.pp} vpp{llm.vpp} dp{llm.dp}"
    return used, [mesh, f"{step_s:.2f} s"]


if __name__ == "__main__":
    main()
