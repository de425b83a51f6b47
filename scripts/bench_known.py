"""Compare predicted step times with published ones: language models of Megatron-LM, torchtitan and llm-foundry.

    python -m scripts.bench_known [--only NAME] [--hardware NAME]

Each run of `scripts/known_runs.py` is planned as it was published: the same mesh, batch and sequence length, and the
kernels of the framework that was measured. No run has a factor of its own, and those marked
"held out" took no part in choosing constants.
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from mmtrain.costs import AnalyticCosts
from mmtrain.data import build_index
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import plan
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.recipe import load_recipe, recipe_fingerprint
from scripts.known_runs import KNOWN_RUNS, KnownRun
from scripts.measurements import arguments, start

GOOD_RATIO = 1.15  # the largest ratio of published to predicted seconds, or of predicted to published, that is good


def main() -> None:
    """Print a row for each run, and the errors of those used and those held out."""
    parser = arguments(__doc__)
    parser.add_argument("--only", help="the name of one run")
    parser.add_argument("--hardware", help="runs on this preset alone")
    options = parser.parse_args()
    ratios: dict[bool, list[float]] = {False: [], True: []}
    report = start("Published step times", options)
    report.table("run", "GPUs", "mesh", "published", "predicted", "ratio", "source")
    for known in KNOWN_RUNS:
        if options.only not in (None, known.name) or options.hardware not in (None, known.hardware.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            seconds = predicted_seconds(known, Path(folder))
        mesh = " ".join(f"{key}{size}" for key, size in known.mesh.items() if key != "sp") or f"shard {known.ranks}"
        ratio = seconds / known.seconds
        ratios[known.held_out].append(ratio)
        name = f"{known.name}, **held out**" if known.held_out else known.name
        gpus, published = f"{known.ranks} {known.hardware.name}", f"{known.seconds:.2f} s"
        report.row(name, gpus, mesh, published, f"{seconds:.2f} s", f"{ratio:.2f}", known.source)
    report.line()
    report.targets()
    for held_out, of_runs in ratios.items():
        if of_runs:
            runs = "runs held out" if held_out else "runs used"
            report.target(
                f"{runs} that are within 15%",
                sum(max(r, 1 / r) <= GOOD_RATIO for r in of_runs),
                len(of_runs),
                at_least=True,
            )
            errors = [abs(ratio - 1) for ratio in of_runs]
            report.figure(f"{runs}: error, median / worst", f"{statistics.median(errors):.0%} / {max(errors):.0%}")


def predicted_seconds(known: KnownRun, folder: Path) -> float:
    """Return the predicted seconds of a step.

    In a pipeline the planner's division of layers gives each chunk equally many blocks, as Megatron-LM does, where they
    can be divided so.
    """
    return plan(planning_problem(known, folder)).predicted.step_time_s


def planning_problem(known: KnownRun, folder: Path) -> PlanningProblem:
    """Return what the planner depends on, with the hardware and the framework of the published run."""
    recipe = load_recipe(_write_recipe(known, folder)).recipe
    problem = formulate_problem(
        recipe,
        build_index(recipe).lengths,
        world_size=known.ranks,
        hardware=known.hardware.name,
        recipe_sha256=recipe_fingerprint(recipe),
    )
    hardware = replace(known.hardware, memory_bytes=problem.hardware.memory_bytes).at_pace_of(known.ranks)
    costs = AnalyticCosts(hardware, problem.precision, known.execution)
    if not known.execution.overlaps_shards:
        hardware = replace(hardware, overlap_slowdown=1.0)
    return replace(problem, costs=costs, cluster=replace(problem.cluster, hardware=hardware))


def _write_recipe(known: KnownRun, folder: Path) -> Path:
    """Write a recipe whose samples all have the length of the published run."""
    (folder / "lengths.csv").write_text(f"count,text\n4096,{known.sequence}\n", encoding="utf-8")
    # Packing fills a microbatch to a little less than its limit, so the limit lies a little above what was published.
    seq_len = known.sequence * known.per_microbatch + known.sequence // 4
    parallel: dict[str, object] = {"placement": "replicated", "shard": "all", "llm": {"recompute": known.recompute}}
    if known.mesh:
        parallel = {
            "placement": "unified",
            "llm": {"sp": True, **known.mesh, "recompute": known.recompute, "tp_overlap": False},
        }
    recipe = {
        "name": known.name.replace(" ", "-").replace(",", ""),
        "model": {"llm": dict(known.llm)},
        "data": {"sources": [{"path": str(folder / "lengths.csv")}], "seq_len": seq_len},
        "cluster": {"hardware": known.hardware.name, "ranks": known.ranks, "memory_gib": 400},  # time is compared alone
        "train": {"steps": 1, "global_batch": known.num_microbatches, "optimizer": {"lr": 1e-4}},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | {"parallel": parallel}), encoding="utf-8")
    return path


if __name__ == "__main__":
    main()
