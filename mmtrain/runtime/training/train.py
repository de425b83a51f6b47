"""`mmtrain train`: the story of a run, from a recipe to a trained model."""

import hashlib
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from mmtrain.balance import Grouping, SampleLengths, StepTargets
from mmtrain.checkpoint import find
from mmtrain.data import (
    BadSampleTracker,
    BatchBuilder,
    DataIndex,
    GroupStream,
    Loader,
    build_index,
    read_quarantine,
    validation_batches,
    write_quarantine,
)
from mmtrain.data.loading.step_format import from_json, to_json
from mmtrain.errors import LaunchError, RunError, StoppedAndSaved, UserError
from mmtrain.plan.artifact.balancing_targets import derive_step_targets
from mmtrain.plan.artifact.data_drift import describe_data_drift
from mmtrain.plan.artifact.plan import Plan
from mmtrain.plan.artifact.plan_files import load_plan, require_match
from mmtrain.recipe import LoadedRecipe, Recipe, dump_recipe, recipe_fingerprint
from mmtrain.report import RunLog, open_progress
from mmtrain.runtime.evaluation.qa_eval import build_held_out_evaluation
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.execution.recorder import StepRecorder, clock_for
from mmtrain.runtime.resilience.config_consensus import flatten, require_consensus
from mmtrain.runtime.resilience.failures import clear_failures, explain_failures, read_failures, report_failures
from mmtrain.runtime.resilience.launch import free_port, launch_local
from mmtrain.runtime.resilience.out_of_memory import predicted_peak_gib
from mmtrain.runtime.resilience.signals import StopSignalListener
from mmtrain.runtime.resilience.watchdog import Watchdog
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, QUARANTINE_FILE, RECIPE_FILE, TRACE_FILE
from mmtrain.runtime.run_state import read_run_state, write_run_state
from mmtrain.runtime.training.checkpointing import BackgroundSaver, restore_checkpoint
from mmtrain.runtime.training.loop import Loop
from mmtrain.runtime.training.step_metrics import StepMetricsReducer
from mmtrain.runtime.training.tracing import RunTracer
from mmtrain.runtime.world import Address, World, find_address, join, leave


class Planner(Protocol):
    """Chooses a plan, as `mmtrain.plan.planner.plan` does. Handed in: the runtime executes plans and makes none."""

    def __call__(
        self, recipe: Recipe, lengths: SampleLengths, *, world_size: int, hardware: str, recipe_sha256: str
    ) -> Plan:
        """Return the plan for a cluster of `world_size` ranks of `hardware`; PlanError if there is none."""
        ...


@dataclass(frozen=True)
class TrainRequest:
    """What the user asked for."""

    loaded: LoadedRecipe
    planner: Planner
    hardware: str  # preset to plan for
    ranks: int  # processes to start where no launcher has started any
    run_dir: Path
    plan_path: Path | None = None
    resume: bool = False
    max_restarts: int = 0  # after failures, of processes that we start
    faults: FaultPoints = field(default_factory=FaultPoints)


def run(request: TrainRequest) -> None:
    """Train, in the processes that a launcher has started, or else in our own.

    Raises UserError for wrong input and RunError where the run breaks; both name what and where.
    """
    address = find_address()
    if address is not None:
        if request.max_restarts:
            raise LaunchError(
                f"--max-restarts: {request.max_restarts} found, but {address.launcher} started these processes and "
                "must restart them (torchrun --max-restarts, sbatch --requeue with --resume); leave it out here"
            )
        if address.attempt:  # with the arguments of the first start
            if read_run_state(request.run_dir).get("status") == "stopped":
                raise StoppedAndSaved("stopped by a signal before this restart, which torchrun counts as a failure")
            request = replace(request, resume=True)
        train_rank(request, address)
    elif request.ranks == 1 and not request.max_restarts:
        train_rank(request, Address(0, 1, 0, "127.0.0.1", free_port(), "mmtrain"))
    else:
        _launch(request)


def _launch(request: TrainRequest) -> None:
    """Start the ranks; when the run breaks, again from the newest good checkpoint, as often as allowed."""
    # What another run has saved is refused by the ranks; a restart must not turn that into resuming it.
    left = 0 if not request.resume and find(request.run_dir / CHECKPOINTS_FOLDER) else request.max_restarts
    while True:
        try:
            return launch_local(request.ranks, partial(train_rank, request))
        except RunError as e:
            error = _root_cause(request, e)
        if not left or not (request.run_dir / RECIPE_FILE).exists():
            raise error
        left -= 1
        print(f"mmtrain: {error}\nmmtrain: starting again, {left} restarts left after this", file=sys.stderr)
        request = replace(request, resume=True)


def _root_cause(request: TrainRequest, error: RunError) -> RunError:
    """What the launcher saw, or, of a run that hung, what its ranks found; and put it into the run's state."""
    failures = read_failures(request.run_dir)
    if any(f.kind == "hang" for f in failures):
        error = RunError(explain_failures(failures, request.ranks))
    if read_run_state(request.run_dir).get("status") in ("running", "failed"):
        write_run_state(request.run_dir, "failed", error=str(error))
    return error


def train_rank(request: TrainRequest, address: Address) -> None:
    """Be one rank of the run."""
    recipe = request.loaded.recipe
    wanted, most = recipe.cluster.ranks, recipe.parallel.max_gpus
    if wanted is not None and address.world_size != wanted and (most is None or address.world_size > most):
        raise LaunchError(
            f"cluster.ranks: {wanted} in the recipe, but {address.world_size} processes were started; "
            "start as many, or leave cluster.ranks out to take what the launcher starts"
        )
    if torch.get_num_threads() > 1 and not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core; more threads than cores would fight the other ranks
    with StopSignalListener() as stop:
        saved = _train(request, join(address), stop)
        leave()
    if saved:
        raise StoppedAndSaved(f"stopped by a signal and saved {saved}; continue with --resume")


def _train(request: TrainRequest, world: World, stop: StopSignalListener) -> Path | None:
    """Train from the first step, or from the newest good checkpoint, to the last, or until a signal stops the run.

    Return the checkpoint of a run that was stopped.
    """
    recipe = request.loaded.recipe
    require_consensus(world, {"recipe": recipe.model_dump(mode="json"), "torch": torch.__version__})
    world.on_first(lambda: _claim(request))
    activity = Activity(recorder=StepRecorder(clock_for(world.device)))
    with report_failures(request.run_dir, world.rank, activity):
        index = build_index(recipe, notify=partial(print, flush=True))  # told by the rank that reads, whichever that is
        require_consensus(world, {"data": {"samples": len(index.samples), "fingerprint": index.fingerprint}})
        plan = _agreed_plan(request, world, index)
        job = build_rank_context(recipe, plan, world, activity, request.faults)
        console = Console(quiet=not world.is_first)
        first = _restore(request, job, index, console) if request.resume else 0
        _introduce(console, request, plan, index)
        return _steps(request, job, plan, index, console, first, stop)


def _steps(
    request: TrainRequest,
    job: RankContext,
    plan: Plan,
    index: DataIndex,
    console: Console,
    first: int,
    stop: StopSignalListener,
) -> Path | None:
    """Open everything that steps need, and take them."""
    recipe, world = job.recipe, job.world
    stream, targets = GroupStream.of(recipe, index), _agreed_targets(world, recipe, plan, index)
    meter, validate = StepMetricsReducer(job, stream, plan.hardware), _validation(job)
    steps = frozenset(recipe.train.trace)
    tracer = RunTracer(steps, job.graph, world, meter.timing, plan.sha256, request.run_dir / TRACE_FILE)
    console.print(f"MFU is the share of {meter.peak_flops:.3g} FLOP/s, {world.size} x {plan.hardware}", highlight=False)
    job.faults.start(world.rank)
    node = socket.gethostname()
    ranks_here, tell = world.all_gather(node).count(node), partial(_tell, world.rank)
    with (
        RunLog(request.run_dir, first + 1, enabled=world.is_first) as log,
        open_progress(console, recipe.name, recipe.train.steps, first + 1) as progress,
        Loader(
            index, stream, recipe, job.dp, job.num_microbatches, job.needs, first, ranks_here, tell, targets
        ) as loader,
        Watchdog(job.activity, recipe.train.watchdog_s, request.run_dir, world.rank, world.size),
    ):
        saver = BackgroundSaver(request.run_dir / CHECKPOINTS_FOLDER, job, _facts(recipe, index))
        predicted = predicted_peak_gib(world.rank, plan.predicted.peak_memory_gib)
        bad = BadSampleTracker(index, recipe.data.max_bad_rate, read_quarantine(request.run_dir / QUARANTINE_FILE))
        loop = Loop(
            job=job,
            index=index,
            loader=loader,
            meter=meter,
            tracer=tracer,
            validate=validate,
            evaluate=build_held_out_evaluation(job),
            log=log,
            progress=progress,
            stop=stop,
            run_dir=request.run_dir,
            saver=saver,
            predicted_gib=predicted,
            bad=bad,
            step_targets=targets,
        )
        return loop.run(first)


def _validation(job: RankContext) -> Callable[[], float]:
    """Return a function that computes the mean loss per target token of the held-out batches."""
    recipe = job.recipe
    if not recipe.train.validate_every:
        return lambda: float("nan")
    index = build_index(recipe, "validation")
    grouping, limit = Grouping.of(recipe.data, recipe.train.global_batch), recipe.train.validate_batches
    metas = validation_batches(index, grouping, job.dp, job.num_microbatches, limit)
    batch_builder = BatchBuilder(index, recipe, job.needs, job.num_microbatches)
    bad = BadSampleTracker(index, recipe.data.max_bad_rate)
    total = sum(meta.total_targets for meta in metas)

    def validate() -> float:
        mine = 0.0
        for meta in metas:
            data = batch_builder.build(meta)
            bad.record_new(data.quarantined)
            mine += job.validate(data).loss * meta.total_targets / total
        return job.world.all_reduce(mine)

    return validate


def _tell(rank: int, text: str) -> None:
    """Say something that concerns one rank, which the first need not know of."""
    print(f"mmtrain: rank {rank}: {text}", file=sys.stderr, flush=True)


def _agreed_plan(request: TrainRequest, world: World, index: DataIndex) -> Plan:
    """Take the plan that the user gave, the one of the run that is resumed, or plan on rank 0; the same on all."""
    recipe = request.loaded.recipe
    sha = recipe_fingerprint(recipe)

    def choose() -> str:
        saved = request.run_dir / PLAN_FILE
        if request.plan_path is not None:
            plan = load_plan(request.plan_path)
            require_match(plan, sha, world.size, request.hardware)
        elif request.resume and saved.exists() and _matches(saved, sha, world.size, request.hardware):
            plan = load_plan(saved)
        else:
            plan = request.planner(
                recipe, index.lengths, world_size=world.size, hardware=request.hardware, recipe_sha256=sha
            )
        plan.save(saved)
        return plan.model_dump_json()

    return Plan.model_validate_json(world.on_first(choose))


def _agreed_targets(world: World, recipe: Recipe, plan: Plan, index: DataIndex) -> StepTargets:
    """What steps are arranged for, as rank 0 has it: a cost table may be missing, or another one, elsewhere."""
    text: str = world.on_first(lambda: to_json(derive_step_targets(recipe, plan, index.lengths)))
    return from_json(StepTargets, text)


def _matches(path: Path, sha: str, world_size: int, hardware: str) -> bool:
    plan = load_plan(path)
    return (plan.recipe_sha256, plan.world_size, plan.hardware) == (sha, world_size, hardware)


def _claim(request: TrainRequest) -> None:
    """Make the run's folder ours; refuse one that holds what another run has learned."""
    folder = request.run_dir
    if not request.resume and find(folder / CHECKPOINTS_FOLDER):
        raise UserError(f"{folder} holds a run already: continue it with --resume, or choose another --run-dir")
    if request.resume and not (folder / RECIPE_FILE).exists():
        raise UserError(f"--resume: {folder} holds no run; leave --resume out to start one there")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECIPE_FILE).write_text(dump_recipe(request.loaded.recipe), encoding="utf-8")
    clear_failures(folder)
    write_run_state(folder, "running", None if request.resume else 0)


def _restore(request: TrainRequest, job: RankContext, index: DataIndex, console: Console) -> int:
    """Load the newest good checkpoint, if the run came as far as saving one; return the step to take next."""
    if not job.world.on_first(lambda: bool(find(request.run_dir / CHECKPOINTS_FOLDER))):
        console.print(f"{request.run_dir} holds no checkpoint yet: starting from the first step")
        return 0
    checkpoint = restore_checkpoint(
        request.run_dir / CHECKPOINTS_FOLDER, job, on_bad=lambda text: console.print(text, style="red")
    )
    before, now = flatten(checkpoint.state["facts"]), flatten(_facts(job.recipe, index))
    changed = [f"{key}: {before.get(key)} then, {now.get(key)} now" for key in now if before.get(key) != now[key]]
    if changed:
        raise UserError(
            f"--resume: the run in {request.run_dir} was made with other settings, so that it could not "
            f"be continued: {'; '.join(changed)}. Restore them, or start anew with another --run-dir"
        )
    console.print(f"resuming after step {checkpoint.step} from {checkpoint.folder}")
    return int(checkpoint.state["next_step"])


def _facts(recipe: Recipe, index: DataIndex) -> dict[str, object]:
    """What must not change between saving and resuming, since the data's order and the weights hang on it."""
    return {
        "model": recipe.model.model_dump(mode="json"),
        "train": {
            "seed": recipe.train.seed,
            "global_batch": recipe.train.global_batch,
            "freeze": " ".join(recipe.train.freeze),
        },
        "data": {
            "seq_len": recipe.data.seq_len,
            "window": recipe.data.window,
            "grouping": recipe.data.grouping,
            "budgets": " ".join(f"{unit}={most}" for unit, most in sorted(recipe.data.budgets.items())),
            "long_tokens": recipe.data.long_tokens,
            "tokenizer_sha256": hashlib.sha256(recipe.data.tokenizer_file.read_bytes()).hexdigest(),
            **recipe.data.model_dump(mode="json", include={"image", "video", "audio"}),
            "samples": len(index.samples),
            "fingerprint": index.fingerprint,
        },
    }


def _introduce(console: Console, request: TrainRequest, plan: Plan, index: DataIndex) -> None:
    meshes = ", ".join(f"{name} tp{u.tp} pp{u.pp} dp{u.dp}" for name, u in plan.units.items())
    console.print(
        f"{plan.placement} plan on {plan.world_size} ranks: {meshes}; predicted {plan.predicted.step_time_s:.3f} s "
        f"a step ({plan.predicted.cost_source})",
        highlight=False,
        soft_wrap=True,
    )
    if changed := describe_data_drift(plan, index.lengths):
        console.print(
            f"the plan was made for other data ({changed}): its prediction does not hold, and another plan may be "
            "faster; `mmtrain plan` makes one",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    kept = f" known from the index kept in {index.cache_folder}" if index.cache_folder else ""
    aside = f", {len(index.quarantined)} set aside (see {QUARANTINE_FILE})" if index.quarantined else ""
    console.print(
        f"{len(index.samples)} samples{kept}{aside}; writing to {request.run_dir}", highlight=False, soft_wrap=True
    )
    if not console.quiet:
        # A run that goes on keeps what it found while decoding.
        before = read_quarantine(request.run_dir / QUARANTINE_FILE) if request.resume else ()
        write_quarantine(request.run_dir / QUARANTINE_FILE, dict.fromkeys((*index.quarantined, *before)))
