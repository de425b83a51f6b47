"""Compare predicted step times with published ones, by hardware, kind of layout, and whether there is an encoder.

    python -m scripts.bench_known [--only NAME] [--hardware NAME] [--group WORDS] [--half fit|judge]
    python -m scripts.bench_known --half judge --write
    python -m scripts.bench_known --mixtures [--write]

Each run of `scripts/known_runs.yaml` is planned as it was published: mesh, batch, sequence length and recomputation;
memory is ignored. It is priced twice: with the kernels of the framework that was measured, and with mmtrain's own, as
`mmtrain plan` prices it. No run has a factor of its own. Constants may be fitted to the half `fit` alone.
`--write` puts the ratios of the other half, with our own kernels, where plans find them and into the pages that state
them.

An error is how far predicted and published seconds lie apart, as a share of the smaller: 15% for 1.15 and 1 / 1.15.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from mmtrain.costs import AnalyticCosts
from mmtrain.costs.framework import OWN_RUNTIME, Execution
from mmtrain.costs.published_errors import (
    HIGH_SHARE,
    PublishedError,
    PublishedErrors,
    bound_of_share,
    error_of,
    published_errors,
)
from mmtrain.data import build_index
from mmtrain.planning.formulate import formulate_problem
from mmtrain.planning.planner import search_placements
from mmtrain.planning.space.budget import SamplingBudget, SearchBudget
from mmtrain.planning.space.problem import PlanningProblem
from mmtrain.recipe import load_recipe, recipe_fingerprint
from scripts.bench_own_runs import report_own_runs
from scripts.known_runs import KnownRun, known_runs, mixture_runs
from scripts.measurements import Report, arguments, start
from scripts.stated_errors import write_errors

GOOD_ERROR = 0.15
BUDGET = SearchBudget(sampling=SamplingBudget(num_batches=1))  # samples are equal, so all batches are
SHOWN_SIZES = ("tp", "pp", "vpp", "cp", "dp", "ep")
HALVES = {"fit": False, "judge": True}  # -> whether its runs are held out


@dataclass(frozen=True)
class Comparison:
    """A published run and its predicted seconds."""

    run: KnownRun
    seconds: float  # with the kernels of the framework that was measured
    own_seconds: float  # with mmtrain's, as `mmtrain plan` prices it

    @property
    def ratio(self) -> float:
        """Predicted over published seconds."""
        return self.seconds / self.run.seconds

    @property
    def own_ratio(self) -> float:
        """The same with mmtrain's own kernels."""
        return self.own_seconds / self.run.seconds


def main() -> None:
    """Print a row for each run and the errors of each group, in both halves."""
    parser = arguments(__doc__)
    parser.add_argument("--only", help="the name of one run")
    parser.add_argument("--hardware", help="runs on this preset alone")
    parser.add_argument("--group", help="groups alone whose names have these words, as in `h100-80g, FSDP`")
    parser.add_argument("--half", choices=tuple(HALVES), help="one half of the runs alone")
    parser.add_argument("--mixtures", action="store_true", help="runs of mixtures of experts, which are in no half")
    parser.add_argument("--write", action="store_true", help="state the errors of the half that judges, or of mixtures")
    options = parser.parse_args()
    narrowed = options.only or options.hardware or options.group
    if options.write and (narrowed or options.half == "fit"):
        parser.error("--write: needs all runs of the half `judge`, or all mixtures; leave out what narrows them")
    report = start("Published step times in two halves", options)
    chosen = [
        run
        for run in (mixture_runs() if options.mixtures else known_runs())
        if options.only in (None, run.name)
        and options.hardware in (None, run.hardware.name)
        and (options.group or "") in run.group
        and (options.half is None or run.held_out == HALVES[options.half])
    ]
    comparisons = report_runs(report, chosen)
    if not options.mixtures:
        report_groups(report, comparisons)
    if not narrowed and not options.mixtures:
        report.line()
        report_own_runs(report)
    if options.write:
        kept = [run for run in published_errors().runs if run.has_experts != options.mixtures]
        write_errors(PublishedErrors(runs=(*kept, *errors_of(comparisons).runs)))


def errors_of(comparisons: Sequence[Comparison]) -> PublishedErrors:
    """Return the ratios of all runs that no constant is fitted to, as plans state them."""
    judging = (comparison for comparison in comparisons if comparison.run.held_out or comparison.run.has_experts)
    return PublishedErrors(
        runs=tuple(
            PublishedError(
                name=comparison.run.name,
                hardware=comparison.run.hardware.name,
                layout=comparison.run.layout,
                is_multimodal=comparison.run.has_encoder,
                has_experts=comparison.run.has_experts,
                ratio=round(comparison.ratio, 4),
            )
            for comparison in judging
        )
    )


def report_runs(report: Report, runs: Sequence[KnownRun]) -> list[Comparison]:
    """Write a row for each run; return the predictions."""
    comparisons = []
    report.table(
        "run", "layout", "published", "its kernels", "ratio", "our kernels", "ratio", "half", "before", "source"
    )
    for run in runs:
        comparison = compare(run)
        comparisons.append(comparison)
        mesh = " ".join(f"{key}{size}" for key, size in run.mesh.items() if key in SHOWN_SIZES)
        seconds = (f"{comparison.seconds:.3g} s", f"{comparison.ratio:.2f}")
        own_seconds = (f"{comparison.own_seconds:.3g} s", f"{comparison.own_ratio:.2f}")
        half = "neither" if run.has_experts else "judge" if run.held_out else "fit"
        source = run.source.replace("|", "/")
        if run.is_sharded:
            mesh = f"shard {run.ranks // (run.mesh.get('tp', 1) * run.mesh.get('cp', 1))} {mesh}".rstrip()
        layout, published = mesh, f"{run.seconds:.3g} s"
        report.row(run.name, layout, published, *seconds, *own_seconds, half, run.before, source)
    report.line()
    return comparisons


def report_groups(report: Report, comparisons: Sequence[Comparison]) -> None:
    """Write the errors of each half and of each group in it, with both kinds of kernels."""
    of_kernels = "median / 9 of 10 / worst"
    report.table(
        "half", "group", "runs", "median ratio", of_kernels, "within 15%", f"our kernels: {of_kernels}", "ditto"
    )
    for half, held_out in HALVES.items():
        of_half = [comparison for comparison in comparisons if comparison.run.held_out == held_out]
        groups = sorted({comparison.run.group for comparison in of_half})
        for group in [None, *groups] if of_half else []:
            chosen = [comparison for comparison in of_half if group in (None, comparison.run.group)]
            ratios = [comparison.ratio for comparison in chosen]
            cells = [*_error_cells(ratios), *_error_cells([comparison.own_ratio for comparison in chosen])]
            report.row(half, group or "all", len(chosen), f"{statistics.median(ratios):.2f}", *cells)


def _error_cells(ratios: Sequence[float]) -> Iterator[str]:
    errors = [error_of(ratio) for ratio in ratios]
    yield f"{statistics.median(errors):.0%} / {bound_of_share(errors, HIGH_SHARE):.0%} / {max(errors):.0%}"
    yield f"{sum(error <= GOOD_ERROR for error in errors)} of {len(errors)}"


def compare(run: KnownRun) -> Comparison:
    """Predict a run with its framework's kernels and with our own."""
    seconds = predicted_seconds(run, run.execution)
    own = seconds if run.execution == OWN_RUNTIME else predicted_seconds(run, OWN_RUNTIME)
    return Comparison(run, seconds, own)


def predicted_seconds(run: KnownRun, execution: Execution) -> float:
    """Return the predicted seconds of a step with these kernels.

    If some layers are recomputed, the seconds lie between those of none and of all: the blocks of a model are equal.
    In a pipeline the planner's division of layers gives each chunk equally many blocks, as Megatron-LM does, where they
    can be divided so.
    """
    shares = {"none": 1 - run.recompute, "all": run.recompute}
    seconds = 0.0
    for recompute, share in shares.items():
        if share:
            with tempfile.TemporaryDirectory() as folder:
                problem = planning_problem(run, execution, recompute, Path(folder))
                _, results = search_placements(problem, BUDGET)  # as `plan`, without its proof of the program
                seconds += share * results.candidates[0].step_time_s
    return seconds


def planning_problem(run: KnownRun, execution: Execution, recompute: str, folder: Path) -> PlanningProblem:
    """Return what the planner depends on, with the hardware of the published run and these kernels."""
    recipe = load_recipe(write_recipe(run, recompute, folder)).recipe
    problem = formulate_problem(
        recipe,
        build_index(recipe).lengths,
        world_size=run.ranks,
        hardware=run.hardware.name,
        recipe_sha256=recipe_fingerprint(recipe),
        budget=BUDGET,
    )
    hardware = replace(run.hardware, memory_bytes=problem.hardware.memory_bytes).at_pace_of(run.ranks)
    costs = AnalyticCosts(hardware, problem.precision, execution)
    if not execution.overlaps_shards:
        hardware = replace(hardware, overlap_slowdown=1.0)
    return replace(problem, costs=costs, cluster=replace(problem.cluster, hardware=hardware))


def write_recipe(run: KnownRun, recompute: str, folder: Path) -> Path:
    """Write a recipe whose samples all have the length of the published run."""
    text = run.sequence if run.text is None else run.text
    rows = f"count,text\n4096,{text}\n" if not run.vision else f"count,text,vision\n4096,{text},{run.vision}\n"
    (folder / "lengths.csv").write_text(rows, encoding="utf-8")
    # Packing fills a microbatch to a little less than its limit, so the limit lies a little above what was published.
    seq_len = run.sequence * run.per_microbatch + run.sequence // 4
    train: dict[str, object] = {"steps": 1, "global_batch": run.num_microbatches, "optimizer": {"lr": 1e-4}}
    train["grad_reduce"] = run.grad_reduce
    if run.lora_rank is not None:
        train["lora"] = {"rank": run.lora_rank}
    recipe = {
        "name": "".join(letter if letter.isalnum() else "-" for letter in run.name),
        "model": {unit: dict(settings) for unit, settings in run.model.items()},
        "data": {"sources": [{"path": str(folder / "lengths.csv")}], "seq_len": seq_len},
        "parallel": _parallel(run, recompute),
        "cluster": {"hardware": run.hardware.name, "ranks": run.ranks, "memory_gib": 400},  # time is compared alone
        "train": train,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def _parallel(run: KnownRun, recompute: str) -> dict[str, object]:
    """Return the settings `parallel`; an encoder has the LLM's tp, as in the runs that have one."""
    encoders = {unit: {"recompute": recompute} for unit in run.model if unit != "llm"}
    if run.is_sharded:
        # Left open, tp and cp would be those of the fastest plan, not of the run.
        inside = {"tp": 1, "cp": 1, **{key: value for key, value in run.mesh.items() if key != "shard"}}
        llm = {"sp": inside["tp"] > 1, "tp_overlap": False, **inside, "recompute": recompute}
        return {"placement": "replicated", "shard": "all", "llm": llm, **encoders}
    llm = {"sp": run.mesh["tp"] > 1, "tp_overlap": False, **run.mesh, "recompute": recompute}
    return {
        "placement": "unified",
        "llm": llm,
        **{unit: {**settings, "tp": run.mesh["tp"]} for unit, settings in encoders.items()},
    }


if __name__ == "__main__":
    main()
