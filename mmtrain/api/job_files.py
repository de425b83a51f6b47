"""Files that start a plan on a cluster: `mmtrain launch`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from mmtrain.api.shipped_recipes import shipped_job_file
from mmtrain.costs import machine_for
from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_files import load_plan, require_match
from mmtrain.recipe import Recipe

CPU_HARDWARE_PREFIX = "cpu"  # of presets whose ranks are processes on cores
_FIRST_OPTION = "#SBATCH --job-name="
_FIRST_LINE_OF_CODE = "set -u\n"


@dataclass(frozen=True)
class JobRequest:
    """What a job runs: a recipe with its settings, on a plan."""

    recipe: Path
    overrides: tuple[str, ...]
    plan: Path
    run_dir: Path
    ranks_per_node: int | None = None  # None: of the recipe's cluster or the hardware preset
    container: str | None = None  # image, for pyxis
    mounts: tuple[str, ...] = ()  # FROM:TO, beside the working folder
    time_limit: str = "24:00:00"


@dataclass(frozen=True)
class JobSize:
    """The nodes of a job."""

    nodes: int
    ranks_per_node: int
    has_gpus: bool

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} with {self.ranks_per_node} {'rank' if self.ranks_per_node == 1 else 'ranks'} each"


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


def slurm_job(request: JobRequest, recipe: Recipe) -> tuple[str, JobSize]:
    """Return a job file for SLURM, and the nodes that it asks for.

    It is the shipped job file with the plan's size and arguments: it saves before its time limit, requeues itself, and
    goes on after lost nodes in the same way. Raises UserError for a plan that does not match the recipe.
    """
    shipped = shipped_job_file()
    if shipped is None:
        raise UserError("this installation of mmtrain holds no job file for SLURM; install it from a wheel with pip")
    plan = load_plan(request.plan)
    require_match(plan, recipe, plan.world_size, plan.hardware)
    size = job_size(plan, recipe, request.ranks_per_node)
    text = shipped.read_text(encoding="utf-8")
    options, _, code = text[text.index(_FIRST_OPTION) :].partition(_FIRST_LINE_OF_CODE)
    job_name = re.sub(r"[^\w.-]", "-", recipe.name)
    options = _with_option(options, "job-name", job_name)
    options = _with_option(options, "nodes", str(size.nodes))
    options = _with_option(options, "gpus-per-node", str(size.ranks_per_node) if size.has_gpus else None)
    options = _with_option(options, "time", request.time_limit)
    return f"{_comment(plan, size)}{options}{_FIRST_LINE_OF_CODE}{_arguments(request, size)}{code}", size


def _with_option(options: str, name: str, value: str | None) -> str:
    """Give an option of the job file another value; None: remove its line."""
    line = "" if value is None else f"#SBATCH --{name}={value}\n"
    changed, count = re.subn(rf"^#SBATCH --{name}=.*\n", lambda _: line, options, flags=re.MULTILINE)
    assert count == 1, f"the shipped job file has --{name} {count} times"
    return changed


def _comment(plan: Plan, size: JobSize) -> str:
    return (
        "#!/bin/bash\n"
        f"# Written by `mmtrain launch slurm` for {size}: {plan.placement} on {plan.world_size} x {plan.hardware}.\n"
        "# Options of `mmtrain train` may follow it: sbatch FILE --set train.steps=1000\n"
        "#\n"
        "# Three minutes before the time limit the run saves, and the job is put back into the queue. So it is when a "
        "node\n# is lost or a task is killed, unless that happens again before the next checkpoint.\n"
    )


def _arguments(request: JobRequest, size: JobSize) -> str:
    """Write the lines that state what the shipped job file takes from its command line and environment."""
    words: Sequence[str] = (
        str(request.recipe),
        str(request.run_dir),
        *("--plan", str(request.plan)),
        *(word for setting in request.overrides for word in ("--set", setting)),
    )
    lines = [f'set -- {" ".join(map(quote, words))} "$@"', f"RANKS_PER_NODE={size.ranks_per_node}"]
    if request.container is not None:
        lines.append(f"CONTAINER={quote(request.container)}")
        lines.append(f"CONTAINER_MOUNTS={quote(','.join(request.mounts))}")
    return "".join(f"{line}\n" for line in lines)
