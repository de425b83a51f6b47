"""`mmtrain launch`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

app = typer.Typer(help="Write the file that starts a plan on a cluster.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None: ...


@app.command()
def slurm(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: Annotated[Path, typer.Option(metavar="FILE", help="Plan file, saved by `plan --out`.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Job file to write. Default: the recipe's name with .sbatch.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run. Default: the recipe's `run_dir`, else runs/NAME."),
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Ranks on each machine. Default: as the plan's hardware has GPUs."),
    ] = None,
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
    import json

    from mmtrain.api.job_files import JobRequest, slurm_job
    from mmtrain.errors import UserError, writing
    from mmtrain.recipe import load_recipe, require_runnable

    if mounts and container is None:
        raise UserError("--mount goes with --container, whose folders it adds to")
    settings = load_recipe(recipe, overrides).recipe
    require_runnable(settings, "launch slurm")
    folder = run_dir or settings.run_dir or Path("runs") / settings.name
    file = out or Path(f"{settings.name}.sbatch")
    request = JobRequest(
        recipe, tuple(overrides), plan, folder, ranks_per_node, container, tuple(mounts or ()), time_limit
    )
    text, size = slurm_job(request, settings)
    with writing("--out", file, "job file"):
        file.write_text(text, encoding="utf-8", newline="\n")
    if as_json:
        typer.echo(json.dumps({"file": str(file), "nodes": size.nodes, "ranks_per_node": size.ranks_per_node}))
        return
    typer.echo(f"{file} written, for {size}. Start it: sbatch {file}")
