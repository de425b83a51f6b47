"""What `mmtrain plan` does with its options: check them, plan, and print."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from mmtrain.api.local_cluster import require_costs
from mmtrain.api.measured_plans import join_launched_ranks, plan_timer, started_ranks
from mmtrain.api.plans import (
    PlannedRun,
    is_saved_plan,
    make_plan,
    plan_for_each_count,
    read_or_make_plan,
    with_steps_of_epochs,
)
from mmtrain.api.recipe_index import index_recipe
from mmtrain.api.stage_runs import require_one_stage
from mmtrain.balance import SampleLengths
from mmtrain.cli.options import require_writable, text_width
from mmtrain.cli.plan_arguments import cluster_overrides, parse_gpu_counts, parse_layout
from mmtrain.errors import MmtrainError, UserError, writing
from mmtrain.planning.advise.baselines import BASELINES
from mmtrain.planning.artifact.plan_files import with_planned_groups
from mmtrain.planning.emit.emit_plan import emit, require_trainer
from mmtrain.planning.emit.emitted_plan import EmittedPlan
from mmtrain.planning.space.problem import PlanRequest
from mmtrain.recipe import Recipe, WrittenRecipe, is_runnable, load_recipe, read_recipe
from mmtrain.report import plan_table
from mmtrain.report.emitted_table import inexpressible_table
from mmtrain.report.epoch_text import epoch_text
from mmtrain.report.plain_text import render_text
from mmtrain.report.plan_difference_table import difference_json, difference_table
from mmtrain.report.run_cost import states_costs
from mmtrain.report.scaling import LimitedRun, choice_text, scaling_json, scaling_rows, scaling_table
from mmtrain.weights import describe_guest

if TYPE_CHECKING:
    from mmtrain.runtime.profiling.launched_ranks import LaunchedRanks

BAR_DELAY_S = 1.0  # a shorter search shows no bar
LINE_DELAY_S = 10.0  # where stderr is no terminal, a shorter search prints no line
NUM_LINES = 4  # lines of progress where stderr is no terminal


class PlanningBar:
    """Shows candidates that are decided, and what the planner does after them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack  # closes the bar on screen
        self._done = 0
        self._started: float | None = None  # seconds of the monotonic clock
        self._bar: Any = None
        self._shown_since: float | None = None  # start of the whole planning, in seconds of the monotonic clock

    def announce(self, text: str) -> None:
        """Say what is done where no candidates are counted, once planning takes long enough to show anything."""
        if self._shown_since is None:
            return
        delay_s = BAR_DELAY_S if sys.stderr.isatty() else LINE_DELAY_S
        if time.monotonic() - self._shown_since > delay_s:
            self._stack.close()
            self._bar = None
            print(f"planning: {text}", file=sys.stderr, flush=True)

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` candidates are decided. A smaller number than before starts a new search."""
        done_before = self._done
        self._done = done
        if self._started is None or done < done_before:
            self._stack.close()
            self._started = time.monotonic()
            self._shown_since = self._shown_since or self._started
            self._bar = None
        elapsed_s = time.monotonic() - self._started
        if not sys.stderr.isatty():
            is_next_line = done * NUM_LINES // total > done_before * NUM_LINES // total
            if elapsed_s > LINE_DELAY_S and is_next_line:
                print(f"planning: {done * 100 // total}%", file=sys.stderr, flush=True)
            return
        if elapsed_s < BAR_DELAY_S:
            return
        if self._bar is None:
            self._bar = self._stack.enter_context(typer.progressbar(length=total, label="planning", file=sys.stderr))
            done_before = 0
        self._bar.update(done - done_before)


@dataclass(frozen=True)
class PlanOptions:
    """The command line of `mmtrain plan`; its help explains each option."""

    recipe: Path
    overrides: tuple[str, ...]
    cluster: str | None
    gpus: str | None
    within_days: float | None
    within_money: float | None
    placement: str | None
    measure: bool
    cuts: int
    baseline: str | None
    compare: str | None
    diff: Path | None
    out: Path | None
    emit: str | None
    emit_to: Path | None
    top: int
    explain: bool
    as_json: bool

    def check(self) -> None:
        """Raise UserError for options that exclude each other, and for a baseline that does not exist."""
        if self.diff is not None:
            self._check_diff(self.diff)
        self._check_emit()
        needs_single_plan = self.out is not None or self.measure or self.compare is not None or self.emit is not None
        if self.gpus is not None and needs_single_plan:
            raise UserError(
                "--gpus compares clusters: leave out --out, --emit, --measure and --compare, which need a single plan"
            )
        for name, limit in (("--within-days", self.within_days), ("--within-money", self.within_money)):
            if limit is not None and self.gpus is None:
                raise UserError(f"{name} chooses among numbers of GPUs: name them too, like --gpus 32,64,128")
        if self.baseline is None:
            return
        if self.baseline not in BASELINES:
            raise UserError(f"--baseline {self.baseline}: no such baseline; allowed: {', '.join(BASELINES)}")
        if self.measure:
            raise UserError(
                "--baseline returns one plan, so --measure has nothing to choose from; leave one of them out"
            )

    def _check_diff(self, diff: Path) -> None:
        of_one_plan = {
            "--gpus": self.gpus,
            "--measure": self.measure or None,
            "--baseline": self.baseline,
            "--compare": self.compare,
            "--out": self.out,
            "--emit": self.emit,
            "--explain": self.explain or None,
        }
        given = [name for name, value in of_one_plan.items() if value is not None]
        if given:
            raise UserError(
                f"--diff compares two plans: leave out {', '.join(given)}; save plans with --out, and compare the files"
            )
        if self.settings_changed and is_saved_plan(diff) and is_saved_plan(self.recipe):
            raise UserError(
                "--diff: --set, --cluster and --placement change a recipe, and both plans are made already; leave them "
                f"out, or name a recipe instead of {self.recipe}"
            )

    def _check_emit(self) -> None:
        if self.emit is None:
            if self.emit_to is not None:
                raise UserError(f"--emit-to {self.emit_to}: name the trainer too, like --emit megatron-lm")
            return
        require_trainer(self.emit)
        if self.as_json and self.emit_to is None:
            raise UserError("--emit and --json both write to standard output: name a file with --emit-to")

    @property
    def gpu_counts(self) -> list[int] | None:
        """The numbers of GPUs to compare. Raises UserError for what is no list of numbers."""
        return None if self.gpus is None else parse_gpu_counts(self.gpus)

    @property
    def settings_changed(self) -> list[str]:
        """What the options change in the recipe, as `KEY=VALUE`; what is set with --set comes last and wins."""
        of_cluster = [] if self.cluster is None else cluster_overrides(self.cluster)
        of_placement = [] if self.placement is None else [f"parallel.placement={self.placement}"]
        return [*of_cluster, *of_placement, *self.overrides]


def run_plan(options: PlanOptions) -> None:
    """Plan for the recipe, or for each of its stages in turn, and print the plans.

    What is wrong with options or recipe is said before anything slow starts. With `--measure` under a launcher, the
    first rank does all of that, and the others run their parts of plans.
    """
    if options.diff is not None:
        options.check()
        typer.echo(_difference_text(options, options.diff))
        return
    with _launched_ranks(options) as ranks:
        for run in _runs(options):
            run.check()
            gpu_counts, settings_changed = run.gpu_counts, run.settings_changed
            settings = load_recipe(run.recipe, settings_changed).recipe
            compared = _compared_recipe(run, settings_changed, settings)
            if run.out is not None:
                require_writable("--out", run.out, "plan")
            if run.emit_to is not None:
                require_writable("--emit-to", run.emit_to, "file")
            if gpu_counts is not None:
                _require_price(run, settings)
            started = started_ranks(settings, ranks)
            require_costs(settings)
            guest = describe_guest(settings)
            lengths = index_recipe(settings).lengths
            if gpu_counts is not None:
                limited_run = _limited_run(run, with_steps_of_epochs(settings, lengths))
                _compare_gpu_counts(run, settings, lengths, gpu_counts, limited_run)
                continue
            with_hints = not run.as_json and not run.measure
            with planning_bar() as progress:
                request = _request(run, settings, progress, ranks)
                planned = make_plan(
                    settings, lengths, request, started=started, compared=compared, with_hints=with_hints
                )
            counted = settings.with_steps(planned.cost.num_steps)
            emitted = None if run.emit is None else emit(planned.plan, counted, run.emit)
            if emitted is not None and run.emit_to is None:
                typer.echo(emitted.text, nl=False)
                typer.echo(inexpressible_table(emitted, text_width()), err=True, nl=False)
            else:
                as_json = planned.plan.model_dump_json(indent=2) if run.as_json else None
                typer.echo(as_json or _plan_text(planned, run, settings, lengths))
                if guest is not None and as_json is None:
                    typer.echo(guest)
            if emitted is not None and run.emit_to is not None:
                _write_emitted(emitted, run, run.emit_to)
            if run.out is not None:
                with writing("--out", run.out, "plan"):
                    planned.plan.save(run.out)
                if not run.as_json:
                    typer.echo(_next_commands(settings, run.recipe, settings_changed, run.out))


@contextmanager
def _launched_ranks(options: PlanOptions) -> Iterator["LaunchedRanks | None"]:
    """Give the ranks that a launcher started, on the first of them; None where plans are not run, or here alone.

    The other ranks take part in what the first one runs, and end with its exit code.
    """
    ranks = join_launched_ranks() if options.measure else None
    if ranks is None:
        yield None
        return
    if not ranks.is_first:
        raise typer.Exit(ranks.follow())
    exit_code = 1
    try:
        yield ranks
        exit_code = 0
    except MmtrainError as error:
        exit_code = error.exit_code
        raise
    finally:
        ranks.end(exit_code)


def _difference_text(options: PlanOptions, diff: Path) -> str:
    """Read or make both plans, and write what differs between them."""
    plans = []
    for path in (diff, options.recipe):
        with planning_bar() as progress:
            request = PlanRequest(num_alternatives=options.top, progress=progress, announce=progress.announce)
            plans.append(read_or_make_plan(path, options.settings_changed, request))
    first, second = plans
    names = (str(diff), str(options.recipe))
    if options.as_json:
        return json.dumps(difference_json(first, second, names), indent=2)
    return difference_table(first, second, names, text_width()).rstrip("\n")


def _runs(options: PlanOptions) -> Iterator[PlanOptions]:
    """Yield the options of every run that is planned, and print which stage of the recipe it is, if it has stages."""
    written = read_recipe(options.recipe, options.overrides)
    if not written.stages or written.chosen_stage is not None:
        yield options
        return
    _require_no_option_of_one_stage(options, written)
    for number, name in enumerate(written.stages, start=1):
        typer.echo(f"stage {number} of {len(written.stages)}, {name}")
        yield replace(options, overrides=(*options.overrides, f"stage={name}"))


def _require_no_option_of_one_stage(options: PlanOptions, written: WrittenRecipe) -> None:
    values = {
        "--out": options.out,
        "--emit": options.emit,
        "--gpus": options.gpus,
        "--json": options.as_json or None,
    }
    require_one_stage(written, next((name for name, value in values.items() if value is not None), None))


def _compared_recipe(options: PlanOptions, settings_changed: list[str], settings: Recipe) -> Recipe | None:
    """Return the recipe with the sizes of `--compare` fixed, and no others; None without that option."""
    if options.compare is None:
        return None
    sizes = parse_layout(options.compare, settings.model.llm.layers)
    planners_own = "parallel.llm.layers_per_chunk=[]"  # the numbers of another division, unless `sizes` has some
    return load_recipe(options.recipe, [*settings_changed, planners_own, *sizes]).recipe


def _request(
    options: PlanOptions, settings: Recipe, progress: PlanningBar, ranks: "LaunchedRanks | None" = None
) -> PlanRequest:
    """Return what the options ask of the planner; of the plans of several numbers of GPUs one loser is named.

    ranks: of a launcher, on which `--measure` runs plans.
    """
    return PlanRequest(
        num_alternatives=1 if options.gpus is not None else options.top,
        explain=options.explain and options.gpus is None,
        baseline=options.baseline,
        measure=plan_timer(settings, ranks) if options.measure else None,
        num_measured=options.cuts,
        progress=progress,
        announce=progress.announce,
    )


def _require_price(options: PlanOptions, settings: Recipe) -> None:
    """Raise UserError for a limit on money without a price."""
    if options.within_money is not None and settings.cluster.price_per_gpu_hour is None:
        raise UserError(
            "--within-money needs the price of a GPU-hour: state it in the recipe, or with "
            "--set cluster.price_per_gpu_hour=2.5"
        )


def _limited_run(options: PlanOptions, settings: Recipe) -> LimitedRun | None:
    """Return what limits the run on one of several numbers of GPUs; None if neither limits nor costs are stated."""
    run = LimitedRun(settings.train.num_steps, settings.cluster, options.within_days, options.within_money)
    return run if run.is_limited or states_costs(settings.cluster) else None


def _compare_gpu_counts(
    options: PlanOptions, settings: Recipe, lengths: SampleLengths, gpu_counts: list[int], run: LimitedRun | None
) -> None:
    """Plan for each number of GPUs; print the comparison as a table or as JSON, and which number meets the limits.

    Raises PlanError, after the comparison, if none does.
    """
    with planning_bar() as progress:
        points = plan_for_each_count(settings, lengths, gpu_counts, _request(options, settings, progress))
    if options.as_json:
        typer.echo(json.dumps(list(scaling_json(points, run)), indent=2))
    else:
        typer.echo(scaling_table(points, text_width(), run))
    if run is not None and run.is_limited:
        sentences = choice_text(scaling_rows(points), run)
        if not options.as_json:
            typer.echo(render_text(sentences, width=text_width()), nl=False)


def _plan_text(planned: PlannedRun, options: PlanOptions, settings: Recipe, lengths: SampleLengths) -> str:
    """Write the plan as tables, then its epochs, how ranks were allocated, hints, and the cost if there are prices."""
    from mmtrain.data.stream.count_steps import estimate_epoch

    lines = [plan_table(planned.plan, text_width(), with_details=options.explain)]
    if not any(source.states_lengths for source in settings.data.sources):  # stated ones stand for more samples
        epoch = estimate_epoch(with_planned_groups(settings, planned.plan), lengths)
        step_time_s = planned.plan.predicted.step_time_s
        text = epoch_text(epoch.steps, epoch.samples_per_step, planned.cost.num_steps, step_time_s)
        lines.append(render_text(text, width=text_width()).rstrip("\n"))
    if planned.allocation is not None:
        lines.append(str(planned.allocation))
    lines += [f"Hint: {hint}" for hint in planned.hints]
    remote = settings.train.checkpoint.remote
    if remote is not None:
        lines.append(f"Checkpoints are copied to {remote}; `train` tries it before it reads data.")
    if states_costs(settings.cluster):
        lines.append(f"Cost of {planned.cost.to_text()}.")
    return "\n".join(lines)


def _next_commands(settings: Recipe, recipe: Path, settings_changed: list[str], out: Path) -> str:
    """Write the commands that use the saved plan, with the settings that it was made with."""
    needed = _settings_that_matter(recipe, settings_changed)
    arguments = " ".join(
        [quote(str(recipe)), *(f"--set {quote(setting)}" for setting in needed), f"--plan {quote(str(out))}"]
    )
    lines = [f"{out} written. Use it with the same settings:"]
    if is_runnable(settings):
        lines.append(f"  mmtrain train {arguments}")
    lines.append(f"  mmtrain report {arguments} -o plan.html")
    return "\n".join(lines)


def _settings_that_matter(recipe: Path, settings_changed: Sequence[str]) -> list[str]:
    """Leave out `KEY=null` where the recipe says nothing of KEY: `--cluster` resets whatever it could say."""
    stated = [setting for setting in settings_changed if not setting.endswith("=null")]
    origins = load_recipe(recipe, stated).origins
    resets = [setting.removesuffix("=null") for setting in settings_changed if setting.endswith("=null")]
    without_effect = {f"{key}=null" for key in resets if not _is_stated(key, origins)}
    return [setting for setting in settings_changed if setting not in without_effect]


def _is_stated(key: str, origins: Iterable[str]) -> bool:
    """Return whether a recipe with values at these dotted paths has one at `key` or below it."""
    return any(path == key or path.startswith(f"{key}.") for path in origins)


def _write_emitted(emitted: EmittedPlan, options: PlanOptions, path: Path) -> None:
    """Write the plan for another trainer, and show what that cannot express."""
    with writing("--emit-to", path, "file"):
        path.write_text(emitted.text, encoding="utf-8", newline="\n")
    if not options.as_json:
        typer.echo(f"{path} written for {emitted.trainer} {emitted.version}.\n")
        typer.echo(inexpressible_table(emitted, text_width()), nl=False)


@contextmanager
def planning_bar() -> Iterator["PlanningBar"]:
    """Give a progress callback for the planner; close the bar at the end of the context."""
    with ExitStack() as stack:
        yield PlanningBar(stack)
