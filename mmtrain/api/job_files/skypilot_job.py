"""`mmtrain launch skypilot`: a task of SkyPilot, which finds machines on clouds and clusters."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from mmtrain.api.job_files.job_request import JobRequest, JobSize, load_job, origin
from mmtrain.api.job_files.worker_paths import WorkerFolder, on_workers
from mmtrain.api.job_files.yaml_files import torchrun_script, yaml_file
from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.version import __version__

BUCKET_FOLDER = "/mmtrain-bucket"  # where a bucket is mounted
BUCKET_SCHEMES = ("s3", "gs", "r2", "cos", "oci", "nebius", "cw")  # that SkyPilot mounts, by sky.data.storage
SYNCED_FOLDER = "~/sky_workdir"  # where SkyPilot copies the working folder
RENDEZVOUS_PORT_OF_TASK = 29500  # of torchrun
# As SkyPilot 0.14.1 names the GPUs of our presets, by the start of a preset's name; `sky show-gpus` lists all.
ACCELERATORS = {
    "a100-80g": "A100-80GB",
    "h100": "H100",
    "h200": "H200",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gb300": "GB300",
    "l40s": "L40S",
    "rtx-pro-6000": "RTXPRO6000",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "a6000": "RTXA6000",
    "mi300x": "MI300X",
}
_BUCKET = re.compile(r"(?P<root>[a-z0-9]+://[^/]+)/*(?P<path>.*)", re.IGNORECASE)
_NODE_VARIABLES = (
    *("--nnodes", '"$SKYPILOT_NUM_NODES"'),
    *("--node-rank", '"$SKYPILOT_NODE_RANK"'),
    *("--master-addr", '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'),
    *("--master-port", str(RENDEZVOUS_PORT_OF_TASK)),
)


@dataclass(frozen=True)
class SkyPilotOptions:
    """What SkyPilot alone is asked for."""

    image: str | None = None  # with mmtrain in it; None: pip installs it
    accelerator: str | None = None  # as `sky show-gpus` lists it; None: of the plan's hardware
    volume: str | None = None  # NAME:DIR, a volume of SkyPilot that all nodes mount
    use_spot: bool = False
    max_restarts: int = 3


def skypilot_job(request: JobRequest, recipe: Recipe, asked: SkyPilotOptions) -> tuple[str, JobSize]:
    """Return a task of SkyPilot that trains a plan, and the nodes that it asks for.

    A managed job starts again when machines are lost, and the run goes on from its newest checkpoint, which lies in a
    bucket or on a volume. Raises UserError for a plan that does not match the recipe, a GPU that SkyPilot has no name
    for, and files that the machines would not see.
    """
    plan, size = load_job(request, recipe)
    storage, run_dir = _storage(request, size, asked)
    synced = PurePosixPath(SYNCED_FOLDER)
    mounted = next(map(PurePosixPath, storage.get("volumes", ())), synced)
    remedy = "SkyPilot copies the working folder alone: move them there or to a --volume, or use URLs for data"
    folder = WorkerFolder(Path.cwd(), synced, mounted, remedy)
    in_folder = JobRequest(request.recipe, request.overrides, request.plan, folder.here / "run", request.ranks_per_node)
    recipe_there, plan_there, _ = on_workers(in_folder, recipe, folder)
    words = (recipe_there, "--plan", plan_there, *request.settings)
    torchrun = ("--nproc-per-node", str(size.ranks_per_node), *_NODE_VARIABLES)
    task = {
        "name": re.sub(r"[^\w.-]", "-", recipe.name, flags=re.ASCII).strip("-_.") or "train",
        "workdir": ".",
        "num_nodes": size.nodes,
        "resources": _resources(plan, size, asked),
        **storage,
        **({} if asked.image else {"setup": _setup(size)}),
        "run": torchrun_script(words, run_dir, *torchrun),
    }
    return yaml_file(_comment(plan, size), task), size


def _comment(plan: Plan, size: JobSize) -> list[str]:
    return [
        origin("skypilot", plan, size),
        "",
        "SkyPilot copies the working folder to each machine: recipe, plan and local data. A managed job, which",
        "`sky jobs launch` starts, starts again when machines are lost, and goes on from the newest checkpoint.",
    ]


def _resources(plan: Plan, size: JobSize, asked: SkyPilotOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if size.has_gpus:
        resources["accelerators"] = f"{asked.accelerator or _accelerator(plan.hardware)}:{size.ranks_per_node}"
    else:
        resources["cpus"] = f"{size.ranks_per_node}+"
    if asked.image:
        resources["image_id"] = f"docker:{asked.image.removeprefix('docker:')}"
    if asked.use_spot:
        resources["use_spot"] = True
    return resources | {"job_recovery": {"max_restarts_on_errors": asked.max_restarts}}


def _accelerator(hardware: str) -> str:
    """Return SkyPilot's name for the GPU of a preset. Raises UserError where it is not known."""
    for start, accelerator in ACCELERATORS.items():
        if hardware.startswith(start):
            return accelerator
    raise UserError(
        f"--accelerator: it is not known what SkyPilot calls the {hardware} of the plan; state a name of "
        "`sky show-gpus`"
    )


def _storage(request: JobRequest, size: JobSize, asked: SkyPilotOptions) -> tuple[dict[str, Any], str]:
    """Return what the task mounts, and the folder of the run on its machines.

    Raises UserError where checkpoints would be lost: several machines that share no folder. A bucket is none: each
    machine caches what it writes, so the first one cannot complete a checkpoint with the parts of the others.
    """
    mounts: dict[str, Any] = {}
    folder = PurePosixPath(request.run_dir.as_posix())
    if asked.volume is not None:
        name, _, place = asked.volume.partition(":")
        if not name or not place.startswith("/"):
            raise UserError(f"--volume: {asked.volume} found, but NAME:DIR is needed, such as shared:/shared")
        mounts["volumes"] = {place: name}
        if not folder.is_relative_to(place):
            raise UserError(f"--run-dir: {folder} is not below {place}, where --volume is mounted")
        return mounts, str(folder)
    if size.nodes > 1:
        raise UserError(
            f"--run-dir: {request.bucket or folder} is no folder that {size.nodes} machines share, so they could not "
            "complete a checkpoint; name a volume with --volume NAME:DIR, and a --run-dir below DIR"
        )
    if request.bucket is None:
        raise UserError(
            f"--run-dir: {folder} would be lost with the machine; name a folder in a bucket, such as "
            f"s3://BUCKET/{folder.name}, or one below --volume NAME:DIR"
        )
    bucket = _BUCKET.fullmatch(request.bucket)
    if bucket is None or bucket["root"].partition(":")[0].lower() not in BUCKET_SCHEMES:
        schemes = ", ".join(f"{scheme}://" for scheme in BUCKET_SCHEMES)
        raise UserError(f"--run-dir: {request.bucket} found, but SkyPilot mounts buckets of {schemes}")
    mounts["file_mounts"] = {BUCKET_FOLDER: {"source": bucket["root"], "mode": "MOUNT_CACHED"}}
    return mounts, str(PurePosixPath(BUCKET_FOLDER, bucket["path"]))


def _setup(size: JobSize) -> str:
    extras = "all,cuda" if size.has_gpus else "all"
    return f"python -m pip install {quote(f'mmtrain[{extras}]=={__version__}')}\n"
