"""Bring the ranks of a run that goes on to where its newest checkpoint left it."""

from dataclasses import dataclass, field

from mmtrain.checkpoint import Checkpoint
from mmtrain.costs import Precision
from mmtrain.durable_files import disk_errors_named, write_whole
from mmtrain.errors import UserError
from mmtrain.models.optim.parameter_specs import MOMENTS
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import dump_recipe
from mmtrain.recipe.settings.base import flatten
from mmtrain.runtime.execution.checkpointing import load_checkpoint
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.resilience.divergence import CourseMonitor
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.training.go_back import read_skipped_positions
from mmtrain.runtime.training.hooks.best_checkpoint import BEST_STATE, BestTracker
from mmtrain.runtime.training.hooks.guards import COURSE_STATE
from mmtrain.runtime.training.rank_session import RankSession
from mmtrain.runtime.training.run_copies import RunCopies, open_newest
from mmtrain.runtime.training.start_run import describe_changed_facts, resume_facts
from mmtrain.runtime.training.train_request import TrainRequest


@dataclass(frozen=True)
class RunPosition:
    """Where a run continues: what the loop must know of the steps before. The default is a new run."""

    first_step: int = 0  # to train, from 0
    skipped_positions: tuple[int, ...] = ()  # of the data, which are left out
    course: CourseMonitor = field(default_factory=CourseMonitor)
    best: BestTracker | None = None  # with `train.best`
    copy_slot: int | None = None  # where the copy in memory lies from which the run goes on, if it does so from one


def restore_run(session: RankSession, rank_context: RankContext, plan: Plan, copies: RunCopies | None) -> RunPosition:
    """Load the newest good checkpoint, on disk or in memory, if there is one; return where to continue.

    Then the run's recipe and plan are in its folder. Raises UserError if settings changed on which the weights or the
    order of the data depend.
    """
    request, world, index, console = session.request, session.patient_world, session.index, session.console
    newest = open_newest(request.run_dir, world, rank_context, copies, console)
    if newest is None:
        console.print(f"{request.run_dir} holds no checkpoint yet: starting from the first step")
        return RunPosition(best=BestTracker.of(rank_context.recipe))

    def require_same_facts(checkpoint: Checkpoint) -> None:
        changed = describe_changed_facts(
            before=flatten(checkpoint.state["facts"]), now=flatten(resume_facts(rank_context.recipe, index))
        )
        if changed:
            raise UserError(
                f"--resume: the run in {request.run_dir} was made with other settings, so that it could not "
                f"be continued: {'; '.join(changed)}. Restore them, or start anew with another --run-dir"
            )

    checkpoint, copy_slot = newest
    load_checkpoint(checkpoint, rank_context, require_same_facts)
    world.on_first(lambda: _write_files(request, plan))
    console.print(f"resuming after step {checkpoint.step} from {checkpoint.folder}")
    if converted := describe_converted_moments(checkpoint, rank_context.recipe.train.optimizer.moments):
        console.print(converted, style="yellow", highlight=False, soft_wrap=True)
    skipped: list[int] = world.on_first(lambda: list(read_skipped_positions(request.run_dir, checkpoint.state)))
    course = CourseMonitor(checkpoint.state.get(COURSE_STATE))
    best = BestTracker.of(rank_context.recipe, checkpoint.state.get(BEST_STATE))
    return RunPosition(int(checkpoint.state["next_step"]), tuple(skipped), course, best, copy_slot)


def describe_converted_moments(checkpoint: Checkpoint, moments: Precision) -> str | None:
    """Say that the optimizer's moments in a checkpoint are of another type than `moments`; None if they are not."""
    saved_moments = _saved_moments(checkpoint)
    if saved_moments in (None, moments):
        return None
    return (
        f"the optimizer's moments are converted: the checkpoint has {saved_moments}, and the recipe sets "
        f"train.optimizer.moments to {moments}"
    )


def _saved_moments(checkpoint: Checkpoint) -> Precision | None:
    """Return the type of the moments in a checkpoint; None where nothing trained."""
    for name, stored in checkpoint.manifest.tensors.items():
        if name.endswith(f"#{MOMENTS[0]}"):
            return "bf16" if stored.dtype == "bfloat16" else "fp32"
    return None


def _write_files(request: TrainRequest, plan: Plan) -> None:
    with disk_errors_named(request.run_dir):
        write_whole(request.run_dir / RECIPE_FILE, dump_recipe(request.recipe))
        write_whole(request.run_dir / PLAN_FILE, plan.file_text())
