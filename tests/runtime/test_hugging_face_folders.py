"""Which checkpoints are owed a Hugging Face folder, and what becomes of one that cannot be written."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mmtrain.checkpoint import BEST_STEP, Ranks, SavingRun, Shard, ShardSpec, Snapshot, find, save
from mmtrain.recipe.settings.train_settings import CheckpointSettings
from mmtrain.runtime.run_folder import ABANDONED_FOLDER, CHECKPOINTS_FOLDER, HUGGING_FACE_FOLDER
from mmtrain.runtime.training.background_call import CALL_NICENESS
from mmtrain.runtime.training.go_back import GoBack, go_back
from mmtrain.runtime.training.hooks import hugging_face
from mmtrain.runtime.training.hooks.hugging_face import HuggingFaceFolders
from mmtrain.runtime.training.run_records import RunRecords
from tests.runtime.test_hooks import Notes


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def records(tmp_path: Path, notes: Notes) -> RunRecords:
    return RunRecords(tmp_path, cast(Any, notes), is_first=True)


def folders_of(records: RunRecords, **settings: Any) -> HuggingFaceFolders:
    return HuggingFaceFolders(CheckpointSettings(**({"hf_every": 20} | settings)), records)


def save_step(
    run_dir: Path, step: int, run: SavingRun | None = None, keep: int = 9, best_step: int | None = None
) -> Path:
    state = {"next_step": step, BEST_STEP: best_step}
    snapshot = Snapshot(step, [Shard("w", ShardSpec((2,)), torch.ones(2))], state)
    return save(run_dir / CHECKPOINTS_FOLDER, snapshot, keep=keep, ranks=Ranks.alone(), run=run)


def test_due_checkpoints_that_are_newer_than_the_newest_folder_are_owed(records: RunRecords) -> None:
    run_dir, folders = records.run_dir, folders_of(records)
    for step in range(10, 60, 10):
        save_step(run_dir, step)

    def owed() -> list[str]:
        return [folder.name[-2:] for folder in find(run_dir / CHECKPOINTS_FOLDER) if folders.is_owed(folder)]

    assert owed() == ["40", "20"]
    (run_dir / HUGGING_FACE_FOLDER / "step-00000020").mkdir(parents=True)
    assert owed() == ["40"]
    folders.look_again(last_step=50)
    assert owed() == ["50", "40"]
    again = save_step(run_dir, 20)
    assert again.name == "step-00000020-2"
    assert folders.is_owed(again), "the run came to this step again after its checkpoint was damaged"


def test_a_checkpoint_stays_until_its_folder_is_written(records: RunRecords) -> None:
    run_dir, folders = records.run_dir, folders_of(records)
    run = SavingRun(still_needs=folders.is_owed)
    for step in range(10, 60, 10):
        save_step(run_dir, step, run, keep=1)
    assert [folder.name[-2:] for folder in find(run_dir / CHECKPOINTS_FOLDER)] == ["50", "40", "20"]
    (run_dir / HUGGING_FACE_FOLDER / "step-00000020").mkdir(parents=True)
    save_step(run_dir, 60, run, keep=1)
    assert [folder.name[-2:] for folder in find(run_dir / CHECKPOINTS_FOLDER)] == ["60", "40"]


@pytest.mark.parametrize(("keep", "best_step", "kept"), [(None, None, 4), (2, None, 2), (1, 20, 2), (1, 30, 1)])
def test_the_newest_folders_and_that_of_the_best_step_are_kept(
    records: RunRecords, keep: int | None, best_step: int | None, kept: int
) -> None:
    root = records.run_dir / HUGGING_FACE_FOLDER
    for step in (20, 40, 60, 80):
        save_step(records.run_dir, step, best_step=best_step)
        (root / f"step-000000{step}").mkdir(parents=True)
        (root / f"step-000000{step}" / "config.json").write_text("{}")
    folders_of(records, hf_keep=keep).retire()
    steps = [int(path.name[-2:]) for path in root.iterdir()]
    assert len(steps) == kept
    assert 80 in steps
    assert (best_step in steps) == (best_step == 20)


def test_a_folder_that_cannot_be_written_is_noted_with_the_command_and_given_up(
    records: RunRecords, notes: Notes
) -> None:
    folders = folders_of(records, hf_part="adapter")
    checkpoint = save_step(records.run_dir, 20)
    while not folders.wait():
        pass
    [note] = notes.texts
    assert note.startswith(f"{records.run_dir}/hf/step-00000020 was not written: {records.run_dir}: not the folder of")
    assert f"`mmtrain export {records.run_dir} --checkpoint 20 --adapter --out DIR`" in note
    assert not folders.is_owed(checkpoint)
    folders.look_again(None)
    assert folders.wait(), "it is not tried again"


def test_going_back_takes_the_folders_of_later_steps_along(records: RunRecords) -> None:
    for step in (20, 40):
        save_step(records.run_dir, step)
        (records.run_dir / HUGGING_FACE_FOLDER / f"step-000000{step}").mkdir(parents=True)
    go_back(records.run_dir, GoBack(20), SavingRun())
    assert [folder.name[-2:] for folder in find(records.run_dir / HUGGING_FACE_FOLDER)] == ["20"]
    aside = records.run_dir / ABANDONED_FOLDER / "after-step-00000020"
    assert [folder.name[-2:] for folder in find(aside / HUGGING_FACE_FOLDER)] == ["40"]
    assert [folder.name[-2:] for folder in find(aside)] == ["40"]


def test_folders_of_checkpoints_that_are_gone_are_set_aside_and_drafts_removed(
    records: RunRecords, notes: Notes
) -> None:
    root = records.run_dir / HUGGING_FACE_FOLDER
    for name in ("step-00000020", "step-00000040", ".step-00000060.77.draft"):
        (root / name).mkdir(parents=True)
    folders_of(records).open(first_step=30)
    assert [path.name for path in root.iterdir()] == ["step-00000020"]
    aside = records.run_dir / ABANDONED_FOLDER / "after-step-00000030" / HUGGING_FACE_FOLDER
    assert [path.name for path in aside.iterdir()] == ["step-00000040"]
    assert notes.texts == [f"step-00000040 in {root} is of a checkpoint that is gone: now in {aside}"]


def test_a_folder_that_is_not_ready_when_the_next_is_due_is_written_with_a_larger_share(
    records: RunRecords, notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Starved:
        """A process that gets no processor time, and leaves its draft when it is killed."""

        def __init__(self, function: object, niceness: int) -> None:
            started.append(niceness)
            (records.run_dir / HUGGING_FACE_FOLDER / f".step-00000020.{len(started)}.draft").mkdir()

        def poll(self) -> None:
            return None

        def close(self) -> None:
            pass

    monkeypatch.setattr(hugging_face, "BackgroundCall", Starved)
    folders = folders_of(records)
    save_step(records.run_dir, 20)
    assert not folders.advance()
    assert not folders.advance()
    assert started == [CALL_NICENESS]
    save_step(records.run_dir, 30)  # not due
    folders.look_again(None)
    assert not folders.advance()
    assert started == [CALL_NICENESS]
    save_step(records.run_dir, 40)
    folders.look_again(None)
    assert not folders.advance()
    assert not folders.advance()
    assert started == [CALL_NICENESS, 0], "it has its share now, and starts over only once"
    [draft] = (records.run_dir / HUGGING_FACE_FOLDER).iterdir()
    assert draft.name == ".step-00000020.2.draft"
    [note] = notes.texts
    assert "step-00000020 was not ready when the next checkpoint was due" in note
