"""Write the schemas by which `test_launch.py` judges files for Kubernetes and SkyPilot.

They are made from packages that the projects publish, without descriptions, and cut to what our files use: a part that
no file of ours has accepts anything. In an environment with these versions:

    pip install kubeflow-trainer-api==2.3.0 skypilot==0.14.1
    python -m tests.cli.write_launch_schemas
"""

import importlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "launch_schemas"
KINDS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}
# What our manifests have something in. Other types accept anything.
USED_TYPES = {
    *KINDS.values(),
    *(f"TrainerV1alpha1{name}" for name in ("TrainJobSpec", "Trainer", "RuntimeRef", "TrainingRuntimeSpec")),
    *(f"TrainerV1alpha1{name}" for name in ("MLPolicy", "TorchMLPolicySource", "JobSetTemplateSpec")),
    *(f"JobsetV1alpha2{name}" for name in ("JobSetSpec", "FailurePolicy", "Network", "ReplicatedJob")),
    *(f"IoK8sApiBatchV1{name}" for name in ("JobTemplateSpec", "JobSpec")),
    *(f"IoK8sApiCoreV1{name}" for name in ("PodTemplateSpec", "PodSpec", "Container", "ResourceRequirements")),
    *(f"IoK8sApiCoreV1{name}" for name in ("Volume", "VolumeMount", "EmptyDirVolumeSource")),
    "IoK8sApiCoreV1PersistentVolumeClaimVolumeSource",
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
}
USED_SKYPILOT_RESOURCES = ("accelerators", "cpus", "image_id", "use_spot", "job_recovery")


def kubernetes_schemas() -> dict[str, Any]:
    """Return a schema for each kind, with its source."""
    models = importlib.import_module("kubeflow_trainer_api.models")
    definitions: dict[str, Any] = {}
    for name in KINDS.values():
        schema = getattr(models, name).model_json_schema(by_alias=True)
        definitions |= schema.pop("$defs") | {name: schema}
    used = {name: _closed(_plain(definitions[name])) for name in sorted(USED_TYPES)}
    return {
        "source": f"kubeflow-trainer-api {version('kubeflow-trainer-api')} (PyPI)",
        "kinds": {kind: {"$ref": f"#/$defs/{name}"} for kind, name in KINDS.items()},
        "$defs": used,
    }


def skypilot_schemas() -> dict[str, Any]:
    """Return the schemas of a task, of its resources and of what it mounts, with their source."""
    schemas = importlib.import_module("sky.utils.schemas")
    task, resources, storage = (
        json.loads(json.dumps(getattr(schemas, f"get_{name}_schema")())) for name in ("task", "resources", "storage")
    )
    for name in set(task["properties"]) - {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run"}:
        task["properties"][name] = {"type": "object"} if name == "volumes" else True
    for name in set(resources["properties"]) - set(USED_SKYPILOT_RESOURCES):
        resources["properties"][name] = True
    for name in set(storage["properties"]) - {"source", "mode"}:
        storage["properties"][name] = True
    return {
        "source": f"sky.utils.schemas of skypilot {version('skypilot')} (PyPI)",
        "task": task,
        "resources": resources,
        "storage": storage,
    }


def _plain(value: Any) -> Any:
    """Return a schema without texts for people, whose references to types that no file of ours has accept anything."""
    if isinstance(value, list):
        return [_plain(child) for child in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value and value["$ref"].rpartition("/")[2] not in USED_TYPES:
        is_quantity = value["$ref"].endswith("ResourceQuantity")  # whose Python class wraps a text or a number
        return {"type": ["string", "number"] if is_quantity else "object"}
    return {
        key: {name: _plain(child) for name, child in content.items()} if key == "properties" else _plain(content)
        for key, content in value.items()
        if key not in ("description", "title", "default")
    }


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that rejects unknown names, as the API server does with strict validation."""
    return schema | {"additionalProperties": False}


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    for name, schemas in (("kubernetes", kubernetes_schemas()), ("skypilot", skypilot_schemas())):
        text = json.dumps(schemas, separators=(",", ":"), sort_keys=True) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
