"""`mmtrain launch kubernetes` and `launch skypilot` write files that fit their plan, by schemas of these projects."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import jsonschema
import pytest
import yaml

from mmtrain.api.job_files.job_request import JobRequest
from mmtrain.api.job_files.kubernetes_job import KubernetesOptions, kubernetes_job
from mmtrain.api.job_files.skypilot_job import ACCELERATORS, SkyPilotOptions, skypilot_job
from mmtrain.costs import PRESETS, preset
from mmtrain.errors import UserError
from mmtrain.planning import load_plan
from mmtrain.recipe import load_recipe
from mmtrain.runtime.run_folder import PLAN_FILE, RECIPE_FILE
from tests.cli.conftest import RunMmtrain

SCHEMAS = Path(__file__).parent / "launch_schemas"
SHELLCHECK = shutil.which("shellcheck")
KUBERNETES = ("kubernetes", "--image", "ours/mmtrain:1", "--claim", "shared", "--namespace", "vision")
SKYPILOT = ("skypilot", "--run-dir", "/shared/it's", "--volume", "models:/shared")
IN_BUCKET = ("skypilot", "--run-dir", "gs://ours/runs/a b", "--ranks-per-node", "2")
FILES = {
    "a TrainJob": KUBERNETES,
    "a JobSet": (*KUBERNETES, "--kind", "jobset", "--run-dir", "runs/it's"),
    "a task": SKYPILOT,
    "a task in a bucket": (*IN_BUCKET, "--spot", "--image", "ours/mmtrain:1"),
}

WriteFile = Callable[..., CompletedProcess[str]]


@pytest.fixture
def project(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a recipe that names its data by relative paths, its plan and its data."""
    data = run_dir.parent / "data"
    (tmp_path / "data").symlink_to(data)
    text = (run_dir / RECIPE_FILE).read_text(encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(text.replace(f"{data}/", "data/"), encoding="utf-8")
    shutil.copy(run_dir / PLAN_FILE, tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_file(project: Path, run_mmtrain: RunMmtrain) -> WriteFile:
    def write(*words: str) -> CompletedProcess[str]:
        size = () if "--ranks-per-node" in words else ("--ranks-per-node", "1")
        return run_mmtrain(
            "launch", words[0], "mine.yaml", "--plan", "plan.json", "--out", "job.yaml", *size, *words[1:]
        )

    return write


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(Path("job.yaml").read_text(encoding="utf-8")))


def scripts(value: object) -> list[str]:
    """Return all shell scripts of a file."""
    if isinstance(value, dict):
        return [text for child in value.values() for text in scripts(child)]
    if isinstance(value, list):
        return [text for child in value for text in scripts(child)]
    return [value] if isinstance(value, str) and "\n" in value else []


def require_valid(document: dict[str, Any]) -> None:
    """Raise jsonschema.ValidationError for a document that its project would reject."""
    if "kind" in document:
        schemas = json.loads((SCHEMAS / "kubernetes.json").read_text(encoding="utf-8"))
        jsonschema.validate(document, schemas["kinds"][document["kind"]] | {"$defs": schemas["$defs"]})
        return
    schemas = json.loads((SCHEMAS / "skypilot.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schemas["task"])
    jsonschema.validate(document["resources"], schemas["resources"])
    for mounted in document.get("file_mounts", {}).values():
        jsonschema.validate(mounted, schemas["storage"])


@pytest.mark.parametrize("words", FILES.values(), ids=FILES)
def test_files_are_valid_and_so_are_their_scripts(write_file: WriteFile, words: tuple[str, ...]) -> None:
    done = write_file(*words, "--set", "train.trace_steps=[2]")
    assert done.returncode == 0, done.stderr
    for document in documents():
        require_valid(document)
    started = scripts(documents())
    assert len(started) == 1 if "--image" in words else 2
    for script in started:
        assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).stderr == b""
        if SHELLCHECK is not None:
            checked = subprocess.run([SHELLCHECK, "--shell=bash", "-"], input=script, capture_output=True, text=True)
            assert checked.stdout == ""


@pytest.mark.parametrize(
    ("words", "place", "wrong"),
    [
        (KUBERNETES, ("spec", "mlPolicy", "numNodes"), "2"),
        (KUBERNETES, ("spec", "maxRestarts"), 3),
        (FILES["a JobSet"], ("spec", "failurePolicy", "maxRestarts"), "3"),
        (SKYPILOT, ("num_nodes",), "2"),
        (SKYPILOT, ("resources", "accelerator"), "H100:8"),
    ],
)
def test_the_schemas_reject(
    write_file: WriteFile, words: tuple[str, ...], place: tuple[str, ...], wrong: object
) -> None:
    assert write_file(*words).returncode == 0
    document = documents()[0]
    part = document
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = wrong
    with pytest.raises(jsonschema.ValidationError):
        require_valid(document)


def test_a_train_job_has_the_size_of_its_plan(write_file: WriteFile) -> None:
    assert write_file(*KUBERNETES, "--max-restarts", "7").returncode == 0
    runtime, job = documents()
    assert [job["spec"]["trainer"][key] for key in ("numNodes", "numProcPerNode")] == [2, 1]
    assert job["spec"]["trainer"]["resourcesPerNode"] == {"requests": {"cpu": "1"}}  # the plan is for cores
    assert (runtime["kind"], runtime["metadata"]["name"]) == ("TrainingRuntime", job["spec"]["runtimeRef"]["name"])
    assert {document["metadata"]["namespace"] for document in (runtime, job)} == {"vision"}
    template = runtime["spec"]["template"]["spec"]
    assert template["failurePolicy"]["maxRestarts"] == 7
    [node] = template["replicatedJobs"]
    [container] = node["template"]["spec"]["template"]["spec"]["containers"]
    assert (container["workingDir"], container["name"]) == ("/workspace", "node")


def test_pods_of_a_job_set_meet_at_the_first(write_file: WriteFile) -> None:
    assert write_file(*FILES["a JobSet"], "--name", "mine").returncode == 0
    [job_set] = documents()
    [node] = job_set["spec"]["replicatedJobs"]
    job = node["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    [script] = scripts(job_set)
    assert '--node-rank "$JOB_COMPLETION_INDEX" --master-addr mine-node-0-0.mine --master-port 29500 ' in script


def test_nodes_have_the_gpus_of_the_plan_and_memory_to_share(project: Path) -> None:
    plan = load_plan(project / "plan.json").model_copy(update={"world_size": 16, "hardware": "h100-80g"})
    plan.save(project / "plan.json")
    recipe = load_recipe(project / "mine.yaml", ["cluster.ranks=null"]).recipe
    request = JobRequest(Path("mine.yaml"), (), Path("plan.json"), Path("/shared/x"))
    text, size = kubernetes_job(request, recipe, KubernetesOptions("ours", "shared", mount="/shared", kind="jobset"))
    pod = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert (size.nodes, size.ranks_per_node) == (2, 8)
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    text, _ = skypilot_job(request, recipe, SkyPilotOptions(volume="models:/shared"))
    task = yaml.safe_load(text)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert "mmtrain[all,cuda]==" in task["setup"]


def test_presets_have_a_name_of_skypilot() -> None:
    named = {name for name in PRESETS if any(name.startswith(start) for start in ACCELERATORS)}
    assert set(PRESETS) - named == {"cpu-core", "a800-80g", "a800-80g-4x200", "gb10-128g"}
    assert all(any(name.startswith(start) for name in PRESETS) for start in ACCELERATORS)


def test_a_run_in_a_bucket_is_written_to_where_it_is_mounted(write_file: WriteFile) -> None:
    assert write_file(*FILES["a task in a bucket"]).returncode == 0
    [task] = documents()
    assert task["file_mounts"] == {"/mmtrain-bucket": {"source": "gs://ours", "mode": "MOUNT_CACHED"}}
    assert "--run-dir '/mmtrain-bucket/runs/a b'" in task["run"]
    assert (task["resources"]["image_id"], task["resources"]["use_spot"]) == ("docker:ours/mmtrain:1", True)
    assert write_file("skypilot", "--set", "run_dir=s3://ours/x", "--ranks-per-node", "2").returncode == 0
    assert documents()[0]["file_mounts"]["/mmtrain-bucket"]["source"] == "s3://ours"


def started(script: str, folder: Path, **variables: str) -> list[str]:
    """Run a script with a torchrun that prints its arguments; return them."""
    program = folder / "torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", **variables}
    return subprocess.run(
        ["bash", "-c", script], env=env, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_torchrun_starts_the_plan_and_resumes_what_has_a_checkpoint(write_file: WriteFile, project: Path) -> None:
    run = project / "it's"
    words = ("skypilot", "--run-dir", str(run), "--volume", f"models:{project}", "--set", "train.trace_steps=[2]")
    assert write_file(*words).returncode == 0
    script = documents()[0]["run"]
    nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    first = started(script, project, **nodes)
    options = dict(zip(first[:10:2], first[1:10:2], strict=True))
    assert (options["--nnodes"], options["--node-rank"], options["--master-addr"]) == ("2", "1", "10.0.0.1")
    train = ["mmtrain", "train", "mine.yaml", "--plan", "plan.json", "--set", "train.trace_steps=[2]"]
    assert first[10:] == ["-m", *train, "--run-dir", str(run)]
    for checkpoints in (run / "checkpoints", run / "stage" / "checkpoints"):
        checkpoints.mkdir(parents=True)
        (checkpoints / "latest").touch()
        assert started(script, project, **nodes) == [*first, "--resume"]
        shutil.rmtree(run)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*KUBERNETES, "--name", "My_Run"), "--name: My_Run is .* .RFC 1123.: .* try --name my-run"),
        ((*KUBERNETES, "--name", "1st"), "a letter first.* try --name st"),
        ((*KUBERNETES, "--name", "x" * 49), "at most 48 characters for 2 nodes"),
        ((*KUBERNETES, "--claim", "Shared"), "--claim: Shared is no name for Kubernetes"),
        ((*KUBERNETES, "--namespace", "a.b"), "--namespace: a.b is no name for Kubernetes"),
        ((*KUBERNETES, "--mount", "workspace"), "--mount: workspace found, but .* absolute path"),
        ((*KUBERNETES, "--kind", "pod"), "--kind: pod found, but it is one of trainjob, jobset"),
        ((*KUBERNETES, "--run-dir", "s3://ours/x"), "--run-dir: s3://ours/x found, but runs write into a folder"),
        ((*KUBERNETES, "--run-dir", "/elsewhere"), "not on the nodes.* --run-dir: /elsewhere"),
        (
            (*KUBERNETES, "--set", "train.init_from=/elsewhere/run"),
            r"see /workspace in .* train.init_from: /elsewhere/run\.",
        ),
        ((*SKYPILOT, "--set", "train.init_from=../run"), r"see ~/sky_workdir in .* train.init_from: /.*/run\."),
        (("skypilot", "--run-dir", "s3://ours/x"), "no folder that 2 machines share"),
        (("skypilot", "--ranks-per-node", "2"), "--run-dir: runs/.* would be lost with the machine"),
        (("skypilot", "--ranks-per-node", "2", "--run-dir", "ftp://x/y"), "SkyPilot mounts buckets of s3://, gs://"),
        (("skypilot", "--volume", "shared"), "--volume: shared found, but NAME:DIR is needed"),
        (("skypilot", "--volume", "a:/b", "--run-dir", "/c"), "--run-dir: /c is not below /b"),
    ],
)
def test_what_would_fail_there_is_refused_here(write_file: WriteFile, words: tuple[str, ...], message: str) -> None:
    done = write_file(*words)
    assert done.returncode == 2, done.stdout
    assert re.search(message, " ".join(done.stderr.split()))
    assert not Path("job.yaml").exists()


def test_gpus_without_a_name_of_skypilot_are_asked_for(project: Path) -> None:
    plan = load_plan(project / "plan.json").model_copy(update={"hardware": "gb10-128g"})
    plan.save(project / "plan.json")
    recipe = load_recipe(project / "mine.yaml", ["cluster.ranks=null"]).recipe
    request = JobRequest(Path("mine.yaml"), (), Path("plan.json"), Path("s3:/ours/x"), ranks_per_node=2)
    assert preset("gb10-128g").ranks_per_node >= 1
    with pytest.raises(UserError, match=r"--accelerator: .* gb10-128g of the plan"):
        skypilot_job(request, recipe, SkyPilotOptions())
    text, _ = skypilot_job(request, recipe, SkyPilotOptions(accelerator="GB10"))
    assert yaml.safe_load(text)["resources"]["accelerators"] == "GB10:2"
