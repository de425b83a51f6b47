"""`mmtrain launch kubernetes`: a TrainJob of Kubeflow Trainer with its runtime, or a JobSet."""

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from mmtrain.api.job_files.job_request import JobRequest, JobSize, load_job, origin, require_folder
from mmtrain.api.job_files.worker_paths import WorkerFolder, on_workers
from mmtrain.api.job_files.yaml_files import torchrun_script, yaml_file
from mmtrain.errors import UserError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe

KubernetesKind = Literal["trainjob", "jobset"]
JOBSET_VERSION = "jobset.x-k8s.io/v1alpha2"
TRAINER_VERSION = "trainer.kubeflow.org/v1alpha1"
NODE = "node"  # the replicated job, and its container, that Kubeflow Trainer takes for the ranks
STEP_LABEL = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # by which it finds the replicated job
RENDEZVOUS_PORT = 29500  # of torchrun
SHARED_MEMORY_GIB_PER_RANK = 2  # for NCCL and data workers; memory is taken only as it is used
MIN_SHARED_MEMORY_GIB = 8  # of a node, as `mmtrain doctor` proposes
GRACE_PERIOD_S = 60  # torchrun lets its ranks save for 30 s after SIGTERM
MAX_LABEL_CHARACTERS = 63  # RFC 1123
MAX_SUBDOMAIN_CHARACTERS = 253
RANDOM_SUFFIX_CHARACTERS = 6  # of a pod's name, with its hyphen
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_DNS_SUBDOMAIN = re.compile(rf"{_DNS_LABEL.pattern}(\.{_DNS_LABEL.pattern})*")
_DNS_LABEL_OF_SERVICE = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")  # RFC 1035: it starts with a letter


@dataclass(frozen=True)
class KubernetesOptions:
    """What Kubernetes alone is asked for."""

    image: str
    claim: str  # a PersistentVolumeClaim that all pods mount
    mount: str = "/workspace"  # where: there lies what the working folder holds here
    kind: KubernetesKind = "trainjob"
    name: str | None = None  # None: the recipe's
    namespace: str | None = None  # None: that of kubectl
    max_restarts: int = 3


def kubernetes_job(request: JobRequest, recipe: Recipe, asked: KubernetesOptions) -> tuple[str, JobSize]:
    """Return manifests that train a plan on Kubernetes, and the nodes that they ask for.

    Each node is one pod, in which torchrun starts a rank for each GPU. When a pod is lost, JobSet starts all again, and
    the run goes on from its newest checkpoint. Raises UserError for a plan that does not match the recipe, names that
    Kubernetes rejects, and files that the pods would not see.
    """
    require_folder(request, "kubernetes")
    plan, size = load_job(request, recipe)
    name = _checked_name(asked.name or recipe.name, size.nodes)
    _check("--claim", asked.claim, _DNS_SUBDOMAIN, MAX_SUBDOMAIN_CHARACTERS)
    if asked.namespace is not None:
        _check("--namespace", asked.namespace, _DNS_LABEL, MAX_LABEL_CHARACTERS)
    if not asked.mount.startswith("/"):
        raise UserError(f"--mount: {asked.mount} found, but pods mount volumes at an absolute path, such as /workspace")
    remedy = f"Copy them to the volume of {asked.claim} at the same places, and start in that folder here"
    mount = PurePosixPath(asked.mount)
    folder = WorkerFolder(Path.cwd(), mount, mount, remedy)
    recipe_there, plan_there, run_dir = on_workers(request, recipe, folder)
    words = (recipe_there, "--plan", plan_there, *request.settings)
    write = _train_job if asked.kind == "trainjob" else _job_set
    metadata = {"name": name} | ({} if asked.namespace is None else {"namespace": asked.namespace})
    return yaml_file(_comment(plan, size, asked), *write(metadata, size, asked, words, run_dir)), size


def _comment(plan: Plan, size: JobSize, asked: KubernetesOptions) -> list[str]:
    operator = "Kubeflow Trainer" if asked.kind == "trainjob" else "JobSet"
    return [
        origin("kubernetes", plan, size),
        "",
        f"The cluster runs {operator}. {asked.mount} of the pods is the volume of {asked.claim}, which all of them",
        "write (ReadWriteMany). Recipe, plan, data and the folder of the run are there.",
        "When a pod is lost, all start again, and the run goes on from its newest checkpoint.",
    ]


def _train_job(
    metadata: dict[str, str], size: JobSize, asked: KubernetesOptions, words: tuple[str, ...], run_dir: str
) -> tuple[dict[str, Any], ...]:
    """Return a runtime with volumes and restarts, and a TrainJob on it; Kubeflow Trainer sets torchrun's PET_*."""
    job = {"backoffLimit": 0, "template": {"spec": _pod(asked, size, {})}}
    template = {"metadata": {"labels": STEP_LABEL}, "spec": job}
    runtime = {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainingRuntime",
        "metadata": metadata | {"labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": size.nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": {"maxRestarts": asked.max_restarts},
                    "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
                }
            },
        },
    }
    train_job = {
        "apiVersion": TRAINER_VERSION,
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"apiGroup": TRAINER_VERSION.split("/")[0], "kind": "TrainingRuntime", **_name(metadata)},
            "trainer": {
                "numNodes": size.nodes,
                "numProcPerNode": size.ranks_per_node,
                "image": asked.image,
                "command": ["bash", "-c", torchrun_script(words, run_dir)],
                "resourcesPerNode": _resources(size),
            },
        },
    }
    return runtime, train_job


def _job_set(
    metadata: dict[str, str], size: JobSize, asked: KubernetesOptions, words: tuple[str, ...], run_dir: str
) -> tuple[dict[str, Any], ...]:
    """Return a JobSet of one indexed job, whose pods are the nodes of torchrun."""
    name = metadata["name"]
    torchrun = (
        *("--nnodes", str(size.nodes), "--nproc-per-node", str(size.ranks_per_node)),
        *("--node-rank", '"$JOB_COMPLETION_INDEX"'),
        *("--master-addr", f"{name}-{NODE}-0-0.{name}", "--master-port", str(RENDEZVOUS_PORT)),
    )
    started = {"command": ["bash", "-c", torchrun_script(words, run_dir, *torchrun)], "resources": _resources(size)}
    job = {
        "completionMode": "Indexed",
        "parallelism": size.nodes,
        "completions": size.nodes,
        "backoffLimit": 0,
        "template": {"spec": _pod(asked, size, started)},
    }
    job_set = {
        "apiVersion": JOBSET_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": asked.max_restarts},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }
    return (job_set,)


def _pod(asked: KubernetesOptions, size: JobSize, started: dict[str, Any]) -> dict[str, Any]:
    """Return the pod of a node; `started` is what its container runs, unless a TrainJob says that."""
    shared_memory_gib = max(MIN_SHARED_MEMORY_GIB, SHARED_MEMORY_GIB_PER_RANK * size.ranks_per_node)
    container = {
        "name": NODE,
        "image": asked.image,
        "workingDir": asked.mount,
        **started,
        "volumeMounts": [
            {"name": "workspace", "mountPath": asked.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_PERIOD_S,
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": asked.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared_memory_gib}Gi"}},
        ],
    }


def _resources(size: JobSize) -> dict[str, dict[str, str]]:
    """Return the GPUs of a node, or a core for each rank where there are none."""
    if size.has_gpus:
        return {"limits": {"nvidia.com/gpu": str(size.ranks_per_node)}}
    return {"requests": {"cpu": str(size.ranks_per_node)}}


def _name(metadata: dict[str, str]) -> dict[str, str]:
    return {"name": metadata["name"]}


def _checked_name(name: str, num_nodes: int) -> str:
    """Return a job's name. Raises UserError for one of which Kubernetes makes no names of a service and of pods."""
    longest = MAX_LABEL_CHARACTERS - len(f"-{NODE}-0-{num_nodes - 1}") - RANDOM_SUFFIX_CHARACTERS
    if not _DNS_LABEL_OF_SERVICE.fullmatch(name) or len(name) > longest:
        proposal = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:longest].rstrip("-") or "train"
        raise UserError(
            f"--name: {name} is no name for Kubernetes (RFC 1123): lower-case letters, digits and hyphens, a letter "
            f"first, no hyphen last, at most {longest} characters for {num_nodes} nodes; try --name {proposal}"
        )
    return name


def _check(option: str, name: str, allowed: re.Pattern[str], longest: int) -> None:
    if not allowed.fullmatch(name) or len(name) > longest:
        dots = ", and dots between them" if allowed is _DNS_SUBDOMAIN else ""
        raise UserError(
            f"{option}: {name} is no name for Kubernetes (RFC 1123): lower-case letters, digits and hyphens, no hyphen "
            f"first or last{dots}; at most {longest} characters"
        )
