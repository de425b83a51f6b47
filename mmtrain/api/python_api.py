"""The functions of `import mmtrain`: what the command line does, called from Python.

Each calls what its command calls, so that both give the same plans, runs and figures. What loads torch runs in a
process of its own (`own_process`), which gives its memory back: `train`, `evaluate`, `verify` and `export`.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmtrain.api.local_cluster import require_costs
from mmtrain.api.opened_run import Run, open_run
from mmtrain.api.own_process import run_in_own_process
from mmtrain.api.plans import make_plan
from mmtrain.api.recipe_index import index_recipe
from mmtrain.api.shipped_recipes import copy_recipe as copy_shipped_recipe
from mmtrain.api.shown_plan import ShownPlan, load_plan
from mmtrain.api.train_requests import TrainOptions, runs_to_train
from mmtrain.errors import UserError
from mmtrain.planning import Plan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, dump_recipe, read_recipe
from mmtrain.recipe import load_recipe as read_and_check

if TYPE_CHECKING:
    from mmtrain.api.exported_run import ExportFormat
    from mmtrain.api.shown_samples import ShownSamples
    from mmtrain.api.simulated_steps import SimulatedSteps
    from mmtrain.checkpoint import ChosenCheckpoint
    from mmtrain.recipe.settings.train_settings import ExportedPart
    from mmtrain.report import EvaluationResult
    from mmtrain.report.verification import Verification
    from mmtrain.weights import ExportDtype

RecipeSource = str | Path | Recipe
PlanSource = str | Path | Plan
ResumePoint = bool | int | Literal["last-good"]

__all__ = [
    "PlanSource",
    "RecipeSource",
    "ResumePoint",
    "copy_recipe",
    "evaluate",
    "export",
    "load_plan",
    "load_recipe",
    "open_run",
    "plan",
    "show_data",
    "simulate",
    "train",
    "verify",
]


def load_recipe(path: str | Path, *, set: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: a YAML file, which may extend others.
        set: settings that take precedence, such as `train.steps=20`, as `--set` has them; `stage=NAME` chooses a stage.

    Raises:
        RecipeError: with all problems at once: dotted path, what was found, what is allowed, file and line.
    """
    return read_and_check(Path(path), set).recipe


def copy_recipe(name: str, out: str | Path = "recipes") -> Path:
    """Copy a recipe that comes with mmtrain, and what it needs, to start from; return its path.

    Data paths start at the current folder.

    Args:
        name: as `mmtrain recipes` lists it, such as `demo` or `whatif/internvl_26b`.
        out: folder to write to; it is made.

    Raises:
        UserError: there is no such recipe, or a file of other content is in the way.
    """
    return copy_shipped_recipe(name, Path(out), Path.cwd()).recipe


def plan(
    recipe: RecipeSource,
    *,
    set: Sequence[str] = (),
    alternatives: int = 5,
    baseline: str | None = None,
    explain: bool = False,
) -> ShownPlan:
    """Search the fastest plan that fits, as `mmtrain plan` does: it is the same plan, and has the same file.

    Args:
        recipe: its path, or what `load_recipe` returned.
        set: settings that take precedence, such as `cluster.ranks=64`.
        alternatives: most plans that lost, each named with the reason.
        baseline: return the plan of a rule of thumb instead, for example `megatron`.
        explain: keep every alternative, and how evenly each fills its ranks.

    Raises:
        RecipeError: the recipe cannot be read, or has problems.
        PlanError: constraints contradict each other or the cluster, or nothing fits into memory.
    """
    with _recipe_file(recipe) as path:
        settings = load_recipe(path, set=set)
    require_costs(settings)
    request = PlanRequest(num_alternatives=alternatives, explain=explain, baseline=baseline)
    return ShownPlan.of(make_plan(settings, index_recipe(settings).lengths, request).plan)


def show_data(
    recipe: RecipeSource,
    source: str | Path | None = None,
    *,
    sample: int | Sequence[int] = 0,
    set: Sequence[str] = (),
) -> "ShownSamples":
    """Show samples as the model reads and learns them, as `mmtrain data show` does.

    Args:
        recipe: its path, or what `load_recipe` returned.
        source: a file or URL of samples; by default the recipe's.
        sample: number of a sample, or several, from 0 through all sources.
        set: settings that take precedence.

    Raises:
        UserError: there is no such sample.
        DataError: the source cannot be read.
    """
    from mmtrain.api.recipe_index import sources_for_recipe
    from mmtrain.api.shown_samples import show_samples

    with _recipe_file(recipe) as path:
        settings = load_recipe(path, set=set)
    sources = sources_for_recipe([] if source is None else [str(source)], settings)
    return show_samples(settings, sources, [sample] if isinstance(sample, int) else list(sample))


def simulate(
    source: RecipeSource | Run,
    *,
    set: Sequence[str] = (),
    plan: PlanSource | None = None,
    step: int = 1,
    fault: str | None = None,
    against: str | Path | Run | None = None,
) -> "SimulatedSteps":
    """Predict a step on the batches that training will see, as `mmtrain simulate` does.

    Args:
        source: a recipe, or a run or its folder, whose recorded steps are simulated.
        set: settings of the recipe that take precedence.
        plan: for a recipe; by default one is made.
        step: to simulate, counted from 1.
        fault: what happens to a rank, such as `slow:3:1.5` or `dead:0`.
        against: a run of the recipe whose trace is compared.

    Raises:
        UserError: the arguments contradict each other, or name something that cannot be read.
    """
    from mmtrain.api.faults import parse_fault
    from mmtrain.api.simulated_steps import simulate_source

    parsed_fault = None if fault is None else parse_fault(fault)
    run = None if against is None else _folder(against)
    if isinstance(source, Run):
        source = _folder(source)
    with _recipe_file(source) as path, _plan_file(plan) as plan_path:
        return simulate_source(path, set, plan_path, run, step, parsed_fault)


def train(
    recipe: RecipeSource,
    *,
    set: Sequence[str] = (),
    plan: PlanSource | None = None,
    run_dir: str | Path | None = None,
    resume: ResumePoint = False,
    max_restarts: int = 0,
    elastic: bool = False,
) -> Run:
    """Train a recipe as `mmtrain train` does, on ranks of this machine, and wait for the end.

    Ranks are processes of their own: their memory is free again when this returns, and a later cell starts new ones.
    An interrupt (a notebook's stop button, Ctrl-C) makes the run save after its step; a second one ends it at once.

    Args:
        recipe: its path, or what `load_recipe` returned. The stages of a recipe run one after another.
        set: settings that take precedence, such as `train.steps=20`.
        plan: that `plan` returned, or its file; by default one is made.
        run_dir: folder of the run; by default the recipe's `run_dir`, else `runs/NAME`.
        resume: True continues from the newest good checkpoint; a step, or `last-good`, goes back to that one first.
        max_restarts: how often to start ranks again after a failure.
        elastic: go on with fewer ranks when some are gone for good.

    Raises:
        UserError: recipe, data, plan or folder do not fit; the message says what to do.
        RunError: the run broke; its folder says where.
        StoppedAndSaved: an interrupt stopped the run; `resume=True` continues it.
    """
    resume_from = None if isinstance(resume, bool) else str(resume)
    with _recipe_file(recipe) as path, _plan_file(plan) as plan_path:
        options = TrainOptions(plan_path, bool(resume), resume_from, None, max_restarts, elastic)
        folder = None if run_dir is None else Path(run_dir)
        runs = runs_to_train(read_recipe(path, set), folder, options)  # says what is wrong before a process starts
        run_in_own_process(_train, path, tuple(set), folder, options, saves_on_stop=True)
    if runs[0].stage is None:
        return Run(runs[0].folder)
    return Run(runs[0].folder.parent, tuple(Run(stage.folder) for stage in runs))


def evaluate(
    run: str | Path | Run,
    *,
    limit: int | None = None,
    ranks: int = 1,
    blank_images: bool = False,
    max_new_tokens: int | None = None,
    draw: int | None = None,
    out: str | Path | None = None,
) -> "EvaluationResult":
    """Score a run's newest good checkpoint on held-out questions, as `mmtrain evaluate` does.

    Args:
        run: that `train` returned, or its folder.
        limit: most questions to ask; by default all.
        ranks: processes to start; the model is split among them, and one with a generator runs whole in each.
        blank_images: replace images by gray and audio by silence.
        max_new_tokens: of an answer; by default 8 more than the longest right answer.
        draw: most held-out captions to draw, for a model with a generator.
        out: file for the answers, one line of JSON each, written as they come.

    Raises:
        UserError: the folder is none of a run, or its recipe has no held-out data.
        CheckpointError: no checkpoint is good.
    """
    options = {
        "limit": limit,
        "ranks": ranks,
        "blank_images": blank_images,
        "max_new_tokens": max_new_tokens,
        "out": None if out is None else Path(out),
    }
    return run_in_own_process(_evaluate, _folder(run), draw, options)


def verify(
    recipe: RecipeSource,
    *,
    set: Sequence[str] = (),
    plan: PlanSource | None = None,
    steps: int = 2,
    whole: bool = False,
    cpu: bool = False,
) -> "Verification":
    """Verify that a plan computes what one process computes, as `mmtrain verify` does.

    Args:
        recipe: its path, or what `load_recipe` returned.
        set: settings that take precedence.
        plan: to verify; by default one is made.
        steps: to train.
        whole: train the model at its own widths; by default it is narrow.
        cpu: use processes on the CPU, even where there are GPUs.

    Raises:
        UserError: the recipe can be planned only, or the plan is of another one.
        RunError: the plan cannot be run.
    """
    with _recipe_file(recipe) as path, _plan_file(plan) as plan_path:
        return run_in_own_process(_verify, path, tuple(set), plan_path, steps, whole, cpu)


def export(
    run: str | Path | Run,
    out: str | Path,
    *,
    checkpoint: "ChosenCheckpoint" = "newest",
    dtype: "ExportDtype | None" = None,
    part: "ExportedPart" = "model",
    format: "ExportFormat" = "hf",
) -> Path:
    """Write a trained model as a folder that transformers, vLLM and SGLang open, as `mmtrain export` does.

    Args:
        run: that `train` returned, or its folder.
        out: folder to write, which must not exist, or a place in an object store, such as `s3://bucket/model`.
        checkpoint: `newest` (the newest good one), `best` (by `train.best`), or the step of one.
        dtype: `bf16`, `fp16` or `fp32`; by default as in the folder that the run started from, else `fp32`.
        part: `model`; `adapter`: those of `train.lora` alone, for peft; `generator`: a folder of diffusers.
        format: `hf`; or `dcp`: weights and optimizer for torch.distributed.checkpoint, under Hugging Face names.

    Raises:
        UserError: the folder is none of a run, `out` exists, or the model has no such part.
        CheckpointError: no checkpoint is good.
    """
    if format == "dcp" and (dtype is not None or part != "model"):
        raise UserError("format: dcp writes what the checkpoint holds; leave dtype and part out")
    run_in_own_process(_export, _folder(run), str(out), checkpoint, dtype, part, format)
    return Path(out)


@contextmanager
def _recipe_file(source: RecipeSource) -> Iterator[Path]:
    """Give the path of a recipe; one that is an object is written, since all that reads recipes reads files."""
    if not isinstance(source, Recipe):
        yield Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
        path = Path(folder, f"{source.name}.yaml")
        path.write_text(dump_recipe(source), encoding="utf-8")
        yield path


@contextmanager
def _plan_file(source: PlanSource | None) -> Iterator[Path | None]:
    """Give the path of a plan's file, which is written for a plan that is an object."""
    if not isinstance(source, Plan):
        yield None if source is None else Path(source)
        return
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as folder:
        path = Path(folder, "plan.json")
        source.save(path)
        yield path


def _folder(run: str | Path | Run) -> Path:
    """Return a run's folder; of several stages, that of the last one."""
    if isinstance(run, Run):
        return run.stages[-1].folder if run.stages else run.folder
    return Path(run)


def _train(path: Path, overrides: Sequence[str], run_dir: Path | None, options: TrainOptions) -> None:
    from mmtrain.api.train_requests import train_requests
    from mmtrain.runtime.resilience.lost_output import ignore_lost_output
    from mmtrain.runtime.training.train import start_training

    ignore_lost_output()
    for request in train_requests(runs_to_train(read_recipe(path, overrides), run_dir, options), options, print):
        start_training(request)


def _evaluate(folder: Path, draw: int | None, options: Mapping[str, Any]) -> "EvaluationResult":
    """Evaluate in this process; `options` are fields of the request."""
    from mmtrain.api.plans import plan_for_started_ranks
    from mmtrain.runtime.evaluation.score_drawings import DrawingRequest
    from mmtrain.runtime.evaluation.score_run import EvaluateRequest
    from mmtrain.runtime.evaluation.score_run import run as evaluate_run

    drawing = DrawingRequest(draw, None, None, None, None)
    with tempfile.TemporaryDirectory(prefix="mmtrain-") as results:
        show = partial(_save, Path(results, "result"))  # on the first rank, a process of its own
        evaluate_run(EvaluateRequest(folder, plan_for_started_ranks, show, drawing=drawing, **options))
        return _saved(Path(results, "result"))


def _save(path: Path, result: "EvaluationResult") -> None:
    import pickle

    path.write_bytes(pickle.dumps(result))


def _saved(path: Path) -> "EvaluationResult":
    import pickle

    result: EvaluationResult = pickle.loads(path.read_bytes())
    return result


def _verify(
    path: Path, overrides: Sequence[str], plan_path: Path | None, steps: int, whole: bool, cpu: bool
) -> "Verification":
    from mmtrain.api.verified_plan import use_cpu, verify_recipe

    if cpu:
        use_cpu()
    return verify_recipe(read_and_check(path, overrides).recipe, plan_path, steps, whole)


def _export(
    run: Path,
    out: str,
    checkpoint: "ChosenCheckpoint",
    dtype: "ExportDtype | None",
    part: "ExportedPart",
    format: "ExportFormat",
) -> None:
    from mmtrain.api.exported_run import export_run, output_place

    written, commands = export_run(run, output_place(out), checkpoint, dtype, part, format=format)
    print("\n".join([*written.notes, written.summary(), *commands]))
