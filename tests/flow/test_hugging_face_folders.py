"""Hugging Face folders that a run writes beside its training: those of `mmtrain export`, also after kills."""

import os
import shutil
from pathlib import Path

import pytest

from mmtrain.checkpoint import find
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, HUGGING_FACE_FOLDER, RUN_STATE_FILE, read_run_state
from mmtrain.runtime.training.export_checkpoint import export_checkpoint
from tests.faults import FailAt
from tests.flow.runs import launch, launch_here, refuse, request_for

EVERY = "train.checkpoint.hf_every=2"
SETTINGS = (EVERY, "train.steps=4", "train.checkpoint.every=0", "train.checkpoint.keep=9")
KEEP_ONE = (*SETTINGS, "train.checkpoint.keep=1", "train.checkpoint.async_save=false")
STEPS = ["step-00000004", "step-00000002"]


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def names(root: Path) -> list[str]:
    """Return the names of complete folders, newest first, and assert that there is nothing else."""
    folders = [folder.name for folder in find(root)]
    assert sorted(folders) == sorted(os.listdir(root)), "a draft is left"
    return folders


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on two ranks that keeps all its checkpoints, so that each can be exported later."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert launch(request_for(data, run_dir, *SETTINGS)) == (0, "")
    return run_dir


@pytest.mark.slow
def test_the_folders_are_those_that_export_writes_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    assert names(whole / HUGGING_FACE_FOLDER) == STEPS
    for folder in find(whole / HUGGING_FACE_FOLDER):
        step = int(folder.name[-1])
        export_checkpoint(whole, step, tmp_path / folder.name, warn=refuse)
        exported = content(tmp_path / folder.name)
        assert {"README.md", "config.json", "model.safetensors"} <= exported.keys()
        assert content(folder) == exported
    weights = [content(folder)["model.safetensors"] for folder in find(whole / HUGGING_FACE_FOLDER)]
    assert len(set(weights)) == len(STEPS), "training changes weights"


@pytest.mark.slow
def test_a_killed_run_writes_what_it_still_owed_and_keeps_checkpoints_for_it(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    """A rank is killed in the step after the first folder was due, which takes longer than a step to write.

    One checkpoint is kept, so that of step 2 would be gone before its folder is written.
    """
    run_dir = tmp_path / "run"
    request = request_for(data, run_dir, *KEEP_ONE)
    code, _ = launch(request, FailAt(rank=0, step=2, kind="kill"))
    assert code != 0
    assert [folder.name for folder in find(run_dir / CHECKPOINTS_FOLDER)] == STEPS[-1:]
    assert launch(request_for(data, run_dir, *KEEP_ONE, resume=True)) == (0, "")
    assert names(run_dir / HUGGING_FACE_FOLDER) == STEPS
    for name in STEPS:
        written, expected = (content(root / HUGGING_FACE_FOLDER / name) for root in (run_dir, whole))
        del written["README.md"], expected["README.md"]  # they state the recipes, which keep other numbers
        assert written == expected
    assert find(run_dir / CHECKPOINTS_FOLDER)[0].name == STEPS[0]


@pytest.mark.slow
def test_a_run_that_ended_while_its_last_folder_was_written_writes_it_when_resumed(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    last = run_dir / HUGGING_FACE_FOLDER / STEPS[0]
    expected = content(last)
    last.rename(last.with_name(f".{last.name}.123.draft"))
    (run_dir / RUN_STATE_FILE).unlink()
    assert launch(request_for(data, run_dir, *SETTINGS, resume=True)) == (0, "")
    assert names(run_dir / HUGGING_FACE_FOLDER) == STEPS
    assert content(last) == expected
    assert read_run_state(run_dir)["status"] == "done"


def test_a_run_that_cannot_be_exported_does_not_start(data: Path, tmp_path: Path) -> None:
    code, message = launch_here(request_for(data, tmp_path / "run", EVERY, "train.checkpoint.hf_part=adapter"))
    assert code == 2
    assert message.startswith(
        "train.checkpoint.hf_every: found 2, but this run cannot be exported as train.checkpoint.hf_part says (adapter)"
    )
    assert "this run has no adapters (train.lora)" in message
    assert not (tmp_path / "run" / CHECKPOINTS_FOLDER).exists()
