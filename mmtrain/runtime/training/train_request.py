"""What the command line asks the runtime to train."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mmtrain.balance import SampleLengths
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import with_planned_groups
from mmtrain.recipe import LoadedRecipe, Recipe, recipe_fingerprint
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.run_owner import ProcessIdentity
from mmtrain.runtime.training.go_back import GoBack


class Planner(Protocol):
    """Chooses a plan, as `planning.planner.plan` does. The caller passes it: the runtime never searches plans."""

    def __call__(
        self, recipe: Recipe, lengths: SampleLengths, *, world_size: int, hardware: str, recipe_sha256: str
    ) -> Plan:
        """Return the plan for a cluster of `world_size` ranks of `hardware`; PlanError if there is none."""
        ...


class Replanner(Protocol):
    """Plans again with other costs, as `mmtrain.planning.whatif.plan_again` does; it can be pickled."""

    def __call__(self, recipe: Recipe, lengths: SampleLengths, *, present: Plan, costs: Path) -> Plan:
        """Return the fastest plan by the table `costs`, with the present one as its first alternative."""
        ...


@dataclass(frozen=True)
class TrainRequest:
    """A run to start or to resume."""

    loaded: LoadedRecipe
    planner: Planner
    replanner: Replanner
    hardware: str  # preset to plan for
    ranks: int  # processes to start where no launcher has started any
    run_dir: Path
    plan_path: Path | None = None
    resume: bool = False
    go_back: GoBack | None = None  # resume at an earlier checkpoint than the newest one
    max_restarts: int = 0  # after failures, of processes that we start
    elastic: bool = False  # go on with another number of ranks than the run had, with plans that are made ahead
    may_be_new: bool = False  # with `resume`: start a run if there is none
    restarting_launcher: ProcessIdentity | None = None  # the process that does so, and keeps the folder meanwhile
    force_unlock: bool = False  # take the folder from a run that owns it
    resume_command: str | None = None  # what continues the run, for messages; None: not started by a command
    mixed_devices: bool = False  # ranks have GPUs of several kinds, and `hardware` is the slowest of them
    chosen_plan: Plan | None = None  # the first plan of the run in this process, once it is known
    num_steps: int | None = None  # of a recipe that states epochs, once groups are counted
    faults: FaultPoints = field(default_factory=FaultPoints)

    @property
    def recipe(self) -> Recipe:
        """The recipe that is trained, with the number and the size of groups once a plan is chosen."""
        recipe = self.loaded.recipe
        if self.chosen_plan is not None:
            recipe = with_planned_groups(recipe, self.chosen_plan)
        return recipe if self.num_steps is None else recipe.with_steps(self.num_steps)

    @property
    def recipe_sha256(self) -> str:
        """The fingerprint of the recipe as it is written, which its plans carry."""
        return recipe_fingerprint(self.loaded.recipe)
