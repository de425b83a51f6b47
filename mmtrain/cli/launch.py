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


@app.command()
def kubernetes(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: PlanFile,
    image: Annotated[str, typer.Option(metavar="IMAGE", help="Container image that has mmtrain and bash.")],
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="PersistentVolumeClaim that all pods write (ReadWriteMany).")
    ],
    mount: Annotated[
        str, typer.Option(metavar="DIR", help="Where pods mount it: there lies what this folder holds here.")
    ] = "/workspace",
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="`trainjob` (Kubeflow Trainer, with its runtime) or `jobset`.")
    ] = "trainjob",
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job. Default: the recipe's.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="NAME", help="Default: that of kubectl.")] = None,
    out: OutFile = None,
    run_dir: FolderOfRun = None,
    ranks_per_node: RanksPerNode = None,
    max_restarts: MaxRestarts = 3,
    as_json: AsJson = False,
) -> None:
    """Write manifests for Kubernetes, sized from a plan.

    Each node is one pod with torchrun. When one is lost, all start again, and the run goes on from its newest
    checkpoint. Recipe, plan, data and run lie on a volume that all pods share, as they lie in this folder here.
    """
    from typing import get_args

    from mmtrain.api.job_files.kubernetes_job import KubernetesKind, KubernetesOptions, kubernetes_job
    from mmtrain.errors import UserError

    kinds: dict[str, KubernetesKind] = {known: known for known in get_args(KubernetesKind)}
    if kind not in kinds:
        raise UserError(f"--kind: {kind} found, but it is one of {', '.join(kinds)}")
    request, settings = _request("kubernetes", recipe, overrides, plan, run_dir, ranks_per_node)
    asked = KubernetesOptions(image, claim, mount, kinds[kind], name, namespace, max_restarts)
    text, size = kubernetes_job(request, settings, asked)
    file = out or Path(f"{settings.name}.yaml")
    _write(file, text, size, f"kubectl create -f {file}", as_json)


@app.command()
def skypilot(
    recipe: RecipeFile,
    overrides: Overrides,
    plan: PlanFile,
    out: OutFile = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            "--run-dir", metavar="DIR", help="Folder of the run: in a bucket (s3://...), or below --volume's folder."
        ),
    ] = None,
    volume: Annotated[
        str | None, typer.Option(metavar="NAME:DIR", help="Volume of SkyPilot that all machines mount at DIR.")
    ] = None,
    ranks_per_node: RanksPerNode = None,
    accelerator: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU as `sky show-gpus` names it. Default: the plan's hardware.")
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Container image that has mmtrain. Default: pip installs it.")
    ] = None,
    use_spot: Annotated[bool, typer.Option("--spot", help="Take spot machines.")] = False,
    max_restarts: MaxRestarts = 3,
    as_json: AsJson = False,
) -> None:
    """Write a task for SkyPilot, sized from a plan.

    SkyPilot finds the machines and copies this folder to them. Checkpoints lie in a mounted bucket, or for several
    machines on a volume, so that a managed job goes on after lost machines.
    """
    from mmtrain.api.job_files.skypilot_job import SkyPilotOptions, skypilot_job

    folder = None if run_dir is None else Path(run_dir)
    request, settings = _request("skypilot", recipe, overrides, plan, folder, ranks_per_node)
    asked = SkyPilotOptions(image, accelerator, volume, use_spot, max_restarts)
    text, size = skypilot_job(request, settings, asked)
    file = out or Path(f"{settings.name}.sky.yaml")
    _write(file, text, size, f"sky jobs launch {file}", as_json)


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
