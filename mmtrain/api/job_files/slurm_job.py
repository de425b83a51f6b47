"""`mmtrain launch slurm`: the shipped job file of SLURM for a plan."""

import re
from dataclasses import dataclass
from shlex import quote

from mmtrain.api.job_files.job_request import JobRequest, JobSize, load_job, origin, require_folder, shipped_text
from mmtrain.api.shipped_recipes import SLURM_JOB_FILE
from mmtrain.recipe import Recipe

_FIRST_OPTION = "#SBATCH --job-name="
_FIRST_LINE_OF_CODE = "set -u\n"
_BEHAVIOUR = """\
# Options of `mmtrain train` may follow it: sbatch FILE --set train.steps=1000
#
# Three minutes before the time limit the run saves, and the job is put back into the queue. So it is when a node
# is lost or a task is killed, unless that happens again before the next checkpoint.
"""


@dataclass(frozen=True)
class SlurmOptions:
    """What SLURM alone is asked for."""

    container: str | None = None  # image, for pyxis
    mounts: tuple[str, ...] = ()  # FROM:TO, beside the working folder
    time_limit: str = "24:00:00"


def slurm_job(request: JobRequest, recipe: Recipe, asked: SlurmOptions) -> tuple[str, JobSize]:
    """Return a job file for SLURM, and the nodes that it asks for.

    It is the shipped job file with the plan's size and arguments: it saves before its time limit, requeues itself, and
    goes on after lost nodes in the same way. Raises UserError for a plan that does not match the recipe.
    """
    text = shipped_text(SLURM_JOB_FILE)
    require_folder(request, "slurm")
    plan, size = load_job(request, recipe)
    options, _, code = text[text.index(_FIRST_OPTION) :].partition(_FIRST_LINE_OF_CODE)
    job_name = re.sub(r"[^\w.-]", "-", recipe.name)
    options = _with_option(options, "job-name", job_name)
    options = _with_option(options, "nodes", str(size.nodes))
    options = _with_option(options, "gpus-per-node", str(size.ranks_per_node) if size.has_gpus else None)
    options = _with_option(options, "time", asked.time_limit)
    comment = f"#!/bin/bash\n# {origin('slurm', plan, size)}\n{_BEHAVIOUR}"
    return f"{comment}{options}{_FIRST_LINE_OF_CODE}{_arguments(request, size, asked)}{code}", size


def _with_option(options: str, name: str, value: str | None) -> str:
    """Give an option of the job file another value; None: remove its line."""
    line = "" if value is None else f"#SBATCH --{name}={value}\n"
    changed, count = re.subn(rf"^#SBATCH --{name}=.*\n", lambda _: line, options, flags=re.MULTILINE)
    assert count == 1, f"the shipped job file has --{name} {count} times"
    return changed


def _arguments(request: JobRequest, size: JobSize, asked: SlurmOptions) -> str:
    """Write the lines that state what the shipped job file takes from its command line and environment."""
    recipe, *options = request.words
    words = (recipe, str(request.run_dir), *options)
    lines = [f'set -- {" ".join(map(quote, words))} "$@"', f"RANKS_PER_NODE={size.ranks_per_node}"]
    if asked.container is not None:
        lines.append(f"CONTAINER={quote(asked.container)}")
        lines.append(f"CONTAINER_MOUNTS={quote(','.join(asked.mounts))}")
    return "".join(f"{line}\n" for line in lines)
