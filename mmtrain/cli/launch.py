"""`mmtrain launch`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

if TYPE_CHECKING:
    from mmtrain.api.job_files.job_request import JobRequest, JobSize
    from mmtrain.recipe import Recipe

app = typer.Typer(help="Write the file that starts a plan on a cluster.", no_args_is_help=True, rich_markup_mode=None)

PlanFile = Annotated[Path, typer.Option("--plan", metavar="FILE", help="Plan file, saved by `plan --out`.")]
OutFile = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: the recipe's name, and a suffix.")
]
FolderOfRun = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="Folder of the run. Default: the recipe's `run_dir`, else runs/NAME."
    ),
]
RanksPerNode = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node", min=1, metavar="N", help="Ranks on each machine. Default: as the plan's hardware has GPUs."
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, metavar="N", help="How often to start again, from the newest checkpoint, after a loss."
    ),
]


@app.callback()
def _group() -> None: ...


@app.command()
def slurm(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: PlanFile,
    out: OutFile = None,
    run_dir: FolderOfRun = None,
    ranks_per_node: RanksPerNode = None,
    container: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Run in this container image, where SLURM has pyxis.")
    ] = None,
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="FROM:TO", help="With --container: mount another folder. Repeatable."),
    ] = None,
    time_limit: Annotated[
        str, typer.Option("--time", metavar="TIME", help="Time limit of one start, as sbatch takes it.")
    ] = "24:00:00",
    as_json: AsJson = False,
) -> None:
    """Write a job file for SLURM, sized from a plan.

    It starts one task per rank on whole nodes, saves before the time limit and queues itself again. Paths are written
    as they are given: start the job from the same folder.
    """
    from mmtrain.api.job_files.slurm_job import SlurmOptions, slurm_job
    from mmtrain.errors import UserError

    if mounts and container is None:
        raise UserError("--mount goes with --container, whose folders it adds to")
    request, settings = _request("slurm", recipe, overrides, plan, run_dir, ranks_per_node)
    text, size = slurm_job(request, settings, SlurmOptions(container, tuple(mounts or ()), time_limit))
    file = out or Path(f"{settings.name}.sbatch")
    _write(file, text, size, f"sbatch {file}", as_json)


@app.command()
def ray(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: PlanFile,
    out: OutFile = None,
    run_dir: FolderOfRun = None,
    ranks_per_node: RanksPerNode = None,
    max_restarts: MaxRestarts = 3,
    as_json: AsJson = False,
) -> None:
    """Write a script that trains on a Ray cluster, sized from a plan.

    Ray starts one worker per rank on whole nodes, and all again when one is lost. Paths are written as they are given:
    start the script from the same folder, which all nodes share.
    """
    from mmtrain.api.job_files.ray_job import ray_job

    request, settings = _request("ray", recipe, overrides, plan, run_dir, ranks_per_node)
    text, size = ray_job(request, settings, max_restarts)
    file = out or Path(f"{settings.name}_ray.py")
    _write(file, text, size, f"python {file}", as_json)


def _request(
    launcher: str,
    recipe: Path,
    overrides: list[str],
    plan: Path,
    run_dir: Path | None,
    ranks_per_node: int | None,
) -> "tuple[JobRequest, Recipe]":
    """Read the recipe of a job; return what the job runs, and the settings."""
    from mmtrain.api.job_files.job_request import JobRequest
    from mmtrain.recipe import load_recipe, require_runnable

    settings = load_recipe(recipe, overrides).recipe
    require_runnable(settings, f"launch {launcher}")
    folder = run_dir or settings.run_dir or Path("runs") / settings.name
    return JobRequest(recipe, tuple(overrides), plan, folder, ranks_per_node), settings


def _write(file: Path, text: str, size: "JobSize", start: str, as_json: bool) -> None:
    """Write a job's file, and say how to start it."""
    import json

    from mmtrain.errors import writing

    with writing("--out", file, "job file"):
        file.write_text(text, encoding="utf-8", newline="\n")
    if as_json:
        typer.echo(json.dumps({"file": str(file), "nodes": size.nodes, "ranks_per_node": size.ranks_per_node}))
        return
    typer.echo(f"{file} written, for {size}. Start it: {start}")
