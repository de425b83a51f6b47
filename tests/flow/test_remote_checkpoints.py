"""Runs whose checkpoints go to an object store: another machine goes on from there, and no outage stops a step."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmtrain.api.exported_run import export_run, output_place
from mmtrain.checkpoint import find
from mmtrain.checkpoint.remote_copies import stored_checkpoints
from mmtrain.data.remote.folder_upload import MARK, is_uploaded
from mmtrain.data.remote.object_store import ObjectStore
from mmtrain.errors import RemoteReadError, StoppedAndSaved, UserError
from mmtrain.program import Forward
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, read_run_state
from tests.faults import FailAt
from tests.flow.launched import train_arguments
from tests.flow.runs import assert_same_end, launch, request_for
from tests.object_server import SECRET, ObjectServer, serve_objects

URL = "s3://bucket/run"
REMOTE = f"train.checkpoint.remote={URL}"
PROBE = "/bucket/run/.mmtrain-can-write"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with serve_objects(monkeypatch) as server:
        yield server


def train(data: Path, run_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `mmtrain train` with copies to the store, in a process of its own."""
    command = [sys.executable, "-m", *train_arguments(data, run_dir, "--set", REMOTE, *options)]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def content(run_dir: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run_dir / CHECKPOINTS_FOLDER / name).iterdir()}


def stored_content(store: ObjectStore, name: str) -> dict[str, bytes]:
    return {path.rpartition("/")[2]: store.read(path) for path in store.sizes(f"checkpoints/{name}")}


def no_secrets(run_dir: Path, text: str) -> None:
    """Assert that no credential is in what was printed, nor in any file of a run."""
    files = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert SECRET not in text
    assert not any(SECRET.encode() in content for content in files)


@pytest.mark.slow
def test_another_machine_goes_on_from_the_store_as_if_nothing_had_happened(
    data: Path, tmp_path: Path, server: ObjectServer
) -> None:
    """The first one is stopped by a signal, and its disk is gone. Another goes on, bit for bit."""
    unbroken, lost, here = (tmp_path / name for name in ("unbroken", "lost", "here"))
    assert launch(request_for(data, unbroken)) == (0, "")
    code, _ = launch(request_for(data, lost, REMOTE), FailAt(0, 3, "signal", action=Forward))
    assert code == StoppedAndSaved.exit_code
    store = ObjectStore.at(URL)
    assert stored_checkpoints(store) == ["step-00000004", "step-00000002"]
    shutil.rmtree(lost)

    refused = train(data, here)
    assert refused.returncode == 2
    assert (
        f"train.checkpoint.remote: {URL} holds a run already, up to step-00000004: continue it with" in refused.stderr
    )
    resumed = train(data, here, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(here, unbroken)
    assert stored_checkpoints(store) == [folder.name for folder in find(here / CHECKPOINTS_FOLDER)]
    for name in stored_checkpoints(store):
        assert stored_content(store, name) == content(here, name)
    assert {"recipe.yaml", "plan.json", "metrics.jsonl"} <= store.sizes().keys()
    assert f"checkpoints are copied to {URL}, which holds 2, up to step-00000004" in resumed.stderr
    assert f"fetched step-00000004 from {URL}" in resumed.stdout + resumed.stderr
    assert f"copied step-00000006 to {URL}/checkpoints" in resumed.stdout
    no_secrets(here, resumed.stdout + resumed.stderr)


@pytest.mark.slow
def test_an_outage_stops_no_step_and_what_it_kept_back_is_copied_later(
    data: Path, tmp_path: Path, server: ObjectServer
) -> None:
    run_dir = tmp_path / "run"
    server.status, server.code = 400, "ExpiredToken"
    server.may_pass = lambda path: path == PROBE
    trained = train(data, run_dir)
    assert trained.returncode == 0, trained.stderr
    assert read_run_state(run_dir)["status"] == "done"
    store = ObjectStore.at(URL)
    assert stored_checkpoints(store) == []
    assert f"checkpoints were not copied to {URL}: {URL}/checkpoints/step-0000000" in trained.stdout
    assert "denied (status 400)" in trained.stdout
    no_secrets(run_dir, trained.stdout + trained.stderr)

    server.status = None
    assert train(data, run_dir, "--resume").returncode == 0
    assert stored_checkpoints(store) == [folder.name for folder in find(run_dir / CHECKPOINTS_FOLDER)]


@pytest.mark.slow
def test_hugging_face_folders_follow_and_exports_go_there(data: Path, tmp_path: Path, server: ObjectServer) -> None:
    run_dir = tmp_path / "run"
    assert launch(request_for(data, run_dir, REMOTE, "train.checkpoint.hf_every=3")) == (0, "")
    store = ObjectStore.at(URL)
    for folder in find(run_dir / "hf"):
        prefix = f"hf/{folder.name}"
        assert {name: store.read(name) for name in store.sizes(prefix)} == files_below(folder, prefix)
        assert is_uploaded(store, prefix)
        first, last = (server.writes.index(f"/bucket/run/{prefix}/{name}") for name in (MARK, "config.json"))
        assert first < server.writes.index(f"/bucket/run/{prefix}/model.safetensors") < last

    place = output_place("s3://bucket/models/small")
    written, _ = export_run(run_dir, place)
    assert written.summary().startswith("s3://bucket/models/small: weights after step 6, 1 file")
    there = ObjectStore.at(str(place))
    assert {name: there.read(name) for name in there.sizes()} == files_below(find(run_dir / "hf")[0])
    assert [path.name for path in run_dir.iterdir() if path.name.startswith(".export")] == []
    with pytest.raises(UserError, match=r"--out s3://bucket/models/small: exists already; name a place where nothing"):
        export_run(run_dir, place)
    with pytest.raises(RemoteReadError, match="there is no such bucket"):
        export_run(run_dir, output_place("s3://none/model"))


def files_below(folder: Path, prefix: str = "") -> dict[str, bytes]:
    names = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {f"{prefix}/{name}" if prefix else name: path.read_bytes() for path, name in names.items()}


@pytest.mark.parametrize(
    ("url", "fault", "message"),
    [
        ("s3://missing/run", None, "s3://missing/run/.mmtrain-can-write: cannot be written: there is no such bucket"),
        (URL, (403, "AccessDenied"), f"{URL}/.mmtrain-can-write: denied (status 403); credentials come from the env"),
        (URL, (503, "SlowDown"), f"{URL}/.mmtrain-can-write: cannot be reached after 2 attempts: status 503"),
    ],
)
def test_a_store_that_takes_nothing_ends_a_run_before_its_data_is_read(
    data: Path, tmp_path: Path, server: ObjectServer, url: str, fault: tuple[int, str] | None, message: str
) -> None:
    if fault is not None:
        server.status, server.code = fault
    no_data = (f"data.sources.0.path={tmp_path}/none.json", f"train.checkpoint.remote={url}")
    code, error = launch(request_for(data, tmp_path / "run", *no_data))
    assert code == 1
    assert error.startswith(f"train.checkpoint.remote: {message}")
    assert SECRET not in error
