"""Plans that lie ready for other numbers of ranks than a run has, so that a run that loses some needs no planning."""

from collections.abc import Callable
from pathlib import Path

from mmtrain.costs.find_hardware import is_same_hardware
from mmtrain.durable_files import disk_errors_named, set_aside, write_whole
from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import load_plan
from mmtrain.runtime.run_folder import STANDBY_PLANS_FOLDER

# Of a run on hundreds of nodes, as many as may be lost between two starts; each start makes plans for the next losses.
MAX_LOST_NODES_AHEAD = 4


def rank_counts_ahead(num_ranks: int, ranks_per_node: int, may_grow: bool) -> list[int]:
    """Return the numbers of ranks to plan for ahead, the likeliest first: with nodes fewer, and with one more."""
    counts = [num_ranks - lost * ranks_per_node for lost in range(1, MAX_LOST_NODES_AHEAD + 1)]
    if may_grow:
        counts.insert(1, num_ranks + ranks_per_node)
    return [count for count in counts if count > 0]


def standby_plan_path(run_dir: Path, num_ranks: int) -> Path:
    """Return where the plan for so many ranks lies."""
    return run_dir / STANDBY_PLANS_FOLDER / f"ranks-{num_ranks:05d}.json"


def save_standby_plan(run_dir: Path, plan: Plan) -> None:
    """Keep a plan for a later start with its number of ranks. Raises OSError that names the file."""
    path = standby_plan_path(run_dir, plan.world_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, plan.file_text())


def load_standby_plan(
    run_dir: Path, recipe_sha256: str, num_ranks: int, hardware: str, notify: Callable[[str], None] = lambda _: None
) -> Plan | None:
    """Return the plan for so many ranks; None if there is none, or if it was made for something else."""
    plan = load_plan_of_run(standby_plan_path(run_dir, num_ranks), notify)
    return plan if plan is not None and is_made_for(plan, recipe_sha256, num_ranks, hardware) else None


def load_plan_of_run(path: Path, notify: Callable[[str], None]) -> Plan | None:
    """Load a plan from a run's folder; None if there is none. One that is damaged is set aside, and `notify` hears it.

    Raises RunError for a disk that fails.
    """
    if not path.exists():
        return None
    try:
        return load_plan(path)
    except PlanError as error:
        with disk_errors_named(path.parent):
            notify(f"{set_aside(path, 'the run gets a new plan')} ({error})")
        return None


def is_made_for(plan: Plan, recipe_sha256: str, num_ranks: int, hardware: str) -> bool:
    """Return whether a run with this recipe, number of ranks and hardware can be executed with a plan."""
    is_of_run = (plan.recipe_sha256, plan.world_size) == (recipe_sha256, num_ranks)
    return is_of_run and is_same_hardware(plan.hardware, hardware)
