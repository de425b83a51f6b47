"""A crash or a full disk at any operation of a save never loses the previous checkpoint or breaks `latest`."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import (
    Checkpoint,
    Ranks,
    SavingRun,
    ShardSpec,
    Snapshot,
    find,
    foreign_drafts,
    latest,
    open_newest_good,
    save,
    verify,
)
from mmtrain.errors import CheckpointError, FolderTaken, RunError
from tests.checkpoint.conftest import Crash, FailingStorage, disk_full, in_threads, shards_of, weights


def save_one(root: Path, step: int, storage: FailingStorage | None = None, keep: int = 2) -> Path:
    return save(root, Snapshot(step, shards_of(step, 0, 1)), keep=keep, ranks=Ranks.alone(), storage=storage)


def fail_everywhere(
    tmp_path: Path, error: Callable[[], BaseException], check: Callable[[Path, str, bool], None]
) -> list[str]:
    """Save steps 1 to 3, keeping two, with operation 0, 1, 2, ... of the third save failing; then check the folder."""
    for number in count():
        root, storage = tmp_path / str(number), FailingStorage(fail_at=number, error=error)
        save_one(root, 1)
        save_one(root, 2)
        failed = False
        try:
            save_one(root, 3, storage)
        except (Crash, CheckpointError):
            failed = True
        if not failed and len(storage.done) <= number:
            return storage.done
        check(root, storage.done[-1], failed)
    raise AssertionError


def newest(root: Path) -> Checkpoint:
    return open_newest_good(root, lambda report: pytest.fail(f"no checkpoint is damaged, but: {report}"))


def require_sound(root: Path, operation: str) -> None:
    """Assert that every checkpoint folder is good, `latest` names one, and the newest can be read."""
    named = latest(root)
    assert named is not None, operation
    assert [verify(folder) for folder in [named, *find(root)]] == [[]] * (1 + len(find(root))), operation
    checkpoint = newest(root)
    assert checkpoint.step >= 2, operation
    assert torch.equal(checkpoint.read("llm.w", ShardSpec((4, 6))), weights(checkpoint.step)), operation


def test_a_crash_at_any_operation_loses_no_checkpoint(tmp_path: Path) -> None:
    def check(root: Path, operation: str, failed: bool) -> None:
        assert failed, operation
        require_sound(root, operation)
        save_one(root, 4)  # the next save removes the drafts
        assert not list(root.glob("draft-*")), operation
        assert newest(root).step == 4, operation

    operations = fail_everywhere(tmp_path, Crash, check)
    assert len(operations) > 20
    named = [name for name in operations if name.startswith("rename")]
    assert named[:2] == ["rename to step-00000003", "rename to latest"]
    assert operations.index("wrote manifest.json") < operations.index("rename to step-00000003")


def test_a_crash_in_the_first_save_leaves_no_checkpoint_or_a_good_one(tmp_path: Path) -> None:
    for number in count():
        root, storage = tmp_path / str(number), FailingStorage(fail_at=number)
        try:
            save_one(root, 1, storage)
        except Crash:
            assert all(verify(folder) == [] for folder in find(root))
            named = latest(root)
            assert named is None or verify(named) == []
        else:
            assert number > 10
            return


def test_a_full_disk_at_any_operation_is_an_error_that_leaves_no_draft(tmp_path: Path) -> None:
    def check(root: Path, operation: str, failed: bool) -> None:
        require_sound(root, operation)
        assert failed, operation
        if not operation.startswith("remove"):
            assert not list(root.glob("draft-*")), operation

    fail_everywhere(tmp_path, disk_full, check)


def test_the_error_of_a_full_disk_names_rank_and_file_on_all_ranks(root: Path) -> None:
    in_threads(2, lambda ranks: save(root, Snapshot(1, shards_of(1, ranks.rank, 2)), keep=2, ranks=ranks))

    def work(ranks: Ranks) -> Path:
        storage = FailingStorage(fail_at=1 if ranks.rank else -1, error=disk_full)
        return save(root, Snapshot(2, shards_of(2, ranks.rank, 2)), keep=2, ranks=ranks, storage=storage)

    errors = in_threads(2, work)
    assert all(isinstance(error, RunError) for error in errors)
    first, second = map(str, errors)
    assert first == second
    assert "saving step 2: rank 1: cannot write" in first
    assert "rank-00001.safetensors: No space left on device" in first
    assert f"Nothing was committed; earlier checkpoints in {root} are untouched." in first
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-00000001"]
    assert newest(root).step == 1


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(root: Path) -> None:
    root.write_text("a file is in the way")
    errors = in_threads(2, lambda ranks: save(root, Snapshot(1, shards_of(1, ranks.rank, 2)), keep=2, ranks=ranks))
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert all(str(root) in str(error) for error in errors)


def test_a_run_removes_only_its_own_drafts(root: Path) -> None:
    storages = [FailingStorage(fail_at=3) for _ in range(2)]
    runs = [SavingRun("aaaaaaaa"), SavingRun("bbbbbbbb")]
    for run, storage in zip(runs, storages, strict=True):
        with pytest.raises(Crash):
            save(root, Snapshot(1, shards_of(1, 0, 1)), keep=2, ranks=Ranks.alone(), storage=storage, run=run)
    assert [path.name[:14] for path in sorted(root.iterdir())] == ["draft-aaaaaaaa", "draft-bbbbbbbb"]
    save(root, Snapshot(1, shards_of(1, 0, 1)), keep=2, ranks=Ranks.alone(), run=runs[0])
    [left] = foreign_drafts(root, runs[0].run_id)
    assert left.name.startswith("draft-bbbbbbbb-")
    assert sorted(path.name for path in root.iterdir()) == sorted([left.name, "latest", "step-00000001"])


@dataclass
class _TakenAfter:
    """A check of ownership that holds a few times."""

    num_checks: int

    def __call__(self) -> None:
        self.num_checks -= 1
        if self.num_checks < 0:
            raise FolderTaken("taken")


def test_nothing_is_committed_or_removed_in_a_folder_that_was_taken_meanwhile(root: Path) -> None:
    save_one(root, 1)
    for num_checks_before in range(3):  # before the draft, before the commit, before old checkpoints are removed
        run = SavingRun("aaaaaaaa", _TakenAfter(num_checks_before))
        step = num_checks_before + 2
        with pytest.raises(CheckpointError, match="taken"):
            save(root, Snapshot(step, shards_of(step, 0, 1)), keep=1, ranks=Ranks.alone(), run=run)
        assert not list(root.glob("draft-*"))
    assert [path.name for path in find(root)] == ["step-00000004", "step-00000001"]
