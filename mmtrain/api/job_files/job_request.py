"""What a job file is written from: a recipe on a plan, and the nodes that the plan fills."""

import re
from dataclasses import dataclass
from pathlib import Path

from mmtrain.api.shipped_recipes import shipped_job_file
from mmtrain.costs import machine_for
from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import load_plan, require_match
from mmtrain.recipe import Recipe

CPU_HARDWARE_PREFIX = "cpu"  # of presets whose ranks are processes on cores
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}(?=[^/])", re.IGNORECASE)  # a path has lost one of the slashes


@dataclass(frozen=True)
class JobRequest:
    """What a job runs: a recipe with its settings, on a plan."""

    recipe: Path
    overrides: tuple[str, ...]
    plan: Path
    run_dir: Path
    ranks_per_node: int | None = None  # None: of the recipe's cluster or the hardware preset

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the arguments of `mmtrain train` that override settings."""
        return tuple(word for setting in self.overrides for word in ("--set", setting))

    @property
    def words(self) -> tuple[str, ...]:
        """Return the arguments of `mmtrain train` but the folder of the run: the recipe, its plan and its settings."""
        return (str(self.recipe), "--plan", str(self.plan), *self.settings)

    @property
    def bucket(self) -> str | None:
        """Return the address of a run folder in a bucket, such as `s3://ours/runs`; None for one in a file system."""
        text = self.run_dir.as_posix()
        scheme = _URL.match(text)
        return f"{scheme[1]}://{text[scheme.end() :]}" if scheme else None


@dataclass(frozen=True)
class JobSize:
    """The nodes of a job."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} with {self.ranks_per_node} {'rank' if self.ranks_per_node == 1 else 'ranks'} each"


def load_job(request: JobRequest, recipe: Recipe) -> tuple[Plan, JobSize]:
    """Load the plan of a job, and return it with its nodes.

    Raises UserError for a plan that does not match the recipe or fills no whole nodes.
    """
    plan = load_plan(request.plan)
    require_match(plan, recipe, plan.world_size, plan.hardware)
    return plan, job_size(plan, recipe, request.ranks_per_node)


def require_folder(request: JobRequest, launcher: str) -> None:
    """Raise UserError for a run folder in a bucket, which `launcher` does not mount."""
    if request.bucket is not None:
        raise UserError(
            f"--run-dir: {request.bucket} found, but runs write into a folder. Mount the bucket on all nodes and name "
            f"the folder there; `launch {launcher}` mounts none, `launch skypilot` does"
        )


def job_size(plan: Plan, recipe: Recipe, ranks_per_node: int | None) -> JobSize:
    """Return the nodes that a plan fills, each whole: it was made for ranks that share a node's links.

    Raises UserError for a plan that fills no whole nodes, and for hardware whose nodes are several machines.
    """
    machine = machine_for(recipe, plan.hardware)
    if ranks_per_node is None and machine.spans_machines and recipe.cluster.ranks_per_node is None:
        raise UserError(
            f"--ranks-per-node: {plan.hardware} joins several machines to one node of {machine.ranks_per_node} ranks; "
            "state how many GPUs one machine has"
        )
    per_node = min(ranks_per_node or machine.ranks_per_node, plan.world_size)
    if plan.world_size % per_node:
        raise UserError(
            f"the plan has {plan.world_size} ranks, which fill no whole nodes of {per_node}: plan for a multiple of "
            f"{per_node}, or state --ranks-per-node"
        )
    return JobSize(plan.world_size // per_node, per_node, not plan.hardware.startswith(CPU_HARDWARE_PREFIX))


def shipped_text(name: str) -> str:
    """Return the text of a job file that mmtrain ships. Raises UserError if this installation holds none."""
    path = shipped_job_file(name)
    if path is None:
        raise UserError(f"this installation of mmtrain holds no {name}; install it from a wheel with pip")
    return path.read_text(encoding="utf-8")


def origin(launcher: str, plan: Plan, size: JobSize) -> str:
    """Return the first line of a file's comment: who wrote it, for what."""
    return (
        f"Written by `mmtrain launch {launcher}` for {size}: {plan.placement} on {plan.world_size} x {plan.hardware}."
    )
