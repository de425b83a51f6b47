"""Copies of checkpoints in an object store: whole or not there, kept by the rules of the disk, and fetched verified."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mmtrain.checkpoint import (
    BEST_STEP,
    Ranks,
    SavingRun,
    Snapshot,
    find,
    latest,
    open_newest_good,
    remote_copies,
    save,
)
from mmtrain.checkpoint.remote_copies import ABANDONED, copy_checkpoints, fetch_newest, stored_checkpoints
from mmtrain.data.remote.object_store import ObjectStore
from mmtrain.data.remote.remote_files import RemoteFiles
from mmtrain.errors import CheckpointError
from tests.checkpoint.conftest import Crash, in_threads, shards_of

fsspec = pytest.importorskip("fsspec")
NAMES = ["step-00000003", "step-00000002", "step-00000001"]


class FailingStore(ObjectStore):
    """Counts operations that change the store, and lets number `fail_at` raise; a write counts before and after."""

    fail_at = -1
    error: Callable[[], BaseException] = Crash
    num_done = 0

    def _count(self) -> None:
        object.__setattr__(self, "num_done", self.num_done + 1)
        if self.num_done - 1 == self.fail_at:
            raise self.error()

    def write(self, name: str, chunks: Callable[[], Iterable[bytes | memoryview]], sha256: str | None = None) -> bool:
        self._count()
        is_written = super().write(name, chunks, sha256)
        self._count()
        return is_written

    def remove(self, name: str) -> None:
        self._count()
        super().remove(name)

    def move(self, name: str, target: str) -> None:
        self._count()
        super().move(name, target)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStore]:
    monkeypatch.setattr(remote_copies, "NUM_UPLOADS_AT_ONCE", 1)  # so that operations have an order
    files = fsspec.filesystem("memory")
    yield FailingStore("memory://bucket/run", RemoteFiles(timeout_s=5, attempts=1, sleep=lambda _: None))
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def save_steps(root: Path, *steps: int, keep: int = 9, state: dict[str, Any] | None = None) -> None:
    """Save checkpoints on two ranks."""
    for step in steps:

        def work(ranks: Ranks, step: int = step) -> Path:
            snapshot = Snapshot(step, shards_of(step, ranks.rank, 2), state or {}, {"rng": "ab"})
            return save(root, snapshot, keep=keep, ranks=ranks)

        assert all(isinstance(folder, Path) for folder in in_threads(2, work))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored_content(store: ObjectStore, name: str) -> dict[str, bytes]:
    return {path.rpartition("/")[2]: store.read(path) for path in store.sizes(f"checkpoints/{name}")}


def fetch(root: Path, store: ObjectStore, **options: Any) -> list[Path | None]:
    bad: list[str] = []
    fetched = in_threads(2, lambda ranks: fetch_newest(root, store, ranks, SavingRun(), on_bad=bad.append, **options))
    for error in fetched:
        if isinstance(error, BaseException):
            raise error
    assert bad == options.get("bad", [])
    return fetched


def test_copies_have_all_bytes_and_follow_the_disk(root: Path, store: FailingStore) -> None:
    save_steps(root, 1, 2, 3)
    report = copy_checkpoints(root, store, keep=2)
    assert report.uploaded == NAMES[:2], "the newest first: the machine may vanish"
    assert stored_checkpoints(store) == NAMES[:2]
    for name in NAMES[:2]:
        assert stored_content(store, name) == content(root / name)
    assert copy_checkpoints(root, store, keep=2).uploaded == []
    save_steps(root, 4)
    assert copy_checkpoints(root, store, keep=2).removed == [NAMES[1]]
    assert stored_checkpoints(store) == ["step-00000004", NAMES[0]]


def test_an_upload_cut_off_anywhere_leaves_no_checkpoint_and_goes_on(root: Path, store: FailingStore) -> None:
    """Saved anew each time, and removed: in the store is a checkpoint with all its files, or none of that name."""
    save_steps(root, 1, 2)
    copy_checkpoints(root, store, keep=1)
    save_steps(root, 3)
    for number in itertools.count():
        store.files.repeat("memory://bucket", lambda files: files.rm("/bucket/run/checkpoints", recursive=True))
        copy_checkpoints_of(root, store, NAMES[1])
        object.__setattr__(store, "num_done", 0)
        object.__setattr__(store, "fail_at", number)
        try:
            copy_checkpoints(root, store, keep=1)
        except Crash:
            is_cut = True
        else:
            is_cut = False
        object.__setattr__(store, "fail_at", -1)
        for name in stored_checkpoints(store):
            assert set(stored_content(store, name)) >= set(content(root / name)), "a checkpoint without its files"
            assert all(stored_content(store, name)[file] == text for file, text in content(root / name).items())
        assert stored_checkpoints(store), "neither the old one nor the new one is there"
        copy_checkpoints(root, store, keep=1)
        assert stored_checkpoints(store) == NAMES[:1]
        assert stored_content(store, NAMES[0]) == content(root / NAMES[0])
        assert len(store.sizes()) == len(content(root / NAMES[0]))
        if not is_cut:
            break
    assert number > 10


def copy_checkpoints_of(root: Path, store: ObjectStore, name: str) -> None:
    """Upload one checkpoint as if it were the only one."""
    for file, text in content(root / name).items():
        store.write(f"checkpoints/{name}/{file}", lambda text=text: [text])


def test_an_upload_goes_on_with_what_is_missing_unless_it_is_of_another_run(
    root: Path, store: FailingStore, tmp_path: Path
) -> None:
    save_steps(root, 1)
    object.__setattr__(store, "fail_at", 6)  # the mark, and two files
    with pytest.raises(Crash):
        copy_checkpoints(root, store, keep=1)
    before = dict(store.sizes())
    assert 2 <= len(before) <= 4
    object.__setattr__(store, "fail_at", -1)
    object.__setattr__(store, "num_done", 0)
    copy_checkpoints(root, store, keep=1)
    assert store.num_done < 2 * len(content(root / NAMES[2])), "files were uploaded again"

    other = tmp_path / "other"
    save_steps(other, 1, state={"another": "run"})
    object.__setattr__(store, "fail_at", store.num_done + 6)
    store.remove(f"checkpoints/{NAMES[2]}/manifest.json")
    with pytest.raises(Crash):
        copy_checkpoints(other, store, keep=1)
    object.__setattr__(store, "fail_at", -1)
    copy_checkpoints(root, store, keep=1)
    assert stored_content(store, NAMES[2]) == content(root / NAMES[2])


def test_the_best_checkpoint_stays_also_where_only_the_store_has_it(
    root: Path, store: FailingStore, tmp_path: Path
) -> None:
    save_steps(root, 1, 2, state={BEST_STEP: 1})
    copy_checkpoints(root, store, keep=1)
    assert stored_checkpoints(store) == NAMES[1:]
    elsewhere = tmp_path / "elsewhere"
    fetch(elsewhere, store)
    assert [folder.name for folder in find(elsewhere)] == [NAMES[1]]
    save_steps(elsewhere, 3, state={BEST_STEP: 1})
    copy_checkpoints(elsewhere, store, keep=1)
    assert stored_checkpoints(store) == [NAMES[0], NAMES[2]]


def test_an_empty_folder_gets_the_newest_bit_for_bit(root: Path, store: FailingStore, tmp_path: Path) -> None:
    save_steps(root, 1, 2)
    copy_checkpoints(root, store, keep=2)
    elsewhere = tmp_path / "elsewhere"
    [folder, again] = fetch(elsewhere, store)
    assert folder == again == elsewhere / NAMES[1] == latest(elsewhere)
    assert content(elsewhere / NAMES[1]) == content(root / NAMES[1])
    assert open_newest_good(elsewhere, print).step == 2
    assert fetch(elsewhere, store) == [None, None]


def test_the_newer_of_disk_and_store_wins(root: Path, store: FailingStore, tmp_path: Path) -> None:
    save_steps(root, 1, 2)
    copy_checkpoints(root, store, keep=2)
    elsewhere = tmp_path / "elsewhere"
    save_steps(elsewhere, 3)
    assert fetch(elsewhere, store) == [None, None], "the disk is ahead"
    behind = tmp_path / "behind"
    save_steps(behind, 1)
    assert fetch(behind, store) == [behind / NAMES[1]] * 2
    (behind / NAMES[1] / "rank-00000.json").unlink()
    assert fetch(behind, store) == [behind / f"{NAMES[1]}-2"] * 2, "what is damaged counts for nothing"


def test_a_damaged_copy_is_reported_and_the_next_one_fetched(root: Path, store: FailingStore, tmp_path: Path) -> None:
    save_steps(root, 1, 2, 3)
    copy_checkpoints(root, store, keep=3)
    file = f"checkpoints/{NAMES[0]}/rank-00001.safetensors"
    flipped = bytearray(store.read(file))
    flipped[-1] ^= 1
    store.write(file, lambda: [bytes(flipped)])
    store.remove(f"checkpoints/{NAMES[1]}/rank-00000.json")
    bad: list[str] = []
    elsewhere = tmp_path / "elsewhere"
    fetched = in_threads(2, lambda ranks: fetch_newest(elsewhere, store, ranks, SavingRun(), on_bad=bad.append))
    assert fetched == [elsewhere / NAMES[2]] * 2
    assert len(bad) == 2
    assert "rank-00001.safetensors: it has not the bytes or the SHA-256 that the manifest says" in bad[0]
    assert "rank-00000.json: missing" in bad[1]
    assert [path.name for path in elsewhere.iterdir() if path.name.startswith("draft")] == []


def test_a_damaged_manifest_in_the_store_stops_no_copy(root: Path, store: FailingStore) -> None:
    save_steps(root, 1, 2)
    copy_checkpoints(root, store, keep=2)
    store.write(f"checkpoints/{NAMES[2]}/manifest.json", lambda: [b"{}"])
    save_steps(root, 3)
    assert copy_checkpoints(root, store, keep=2).uploaded == [NAMES[0]]
    assert stored_checkpoints(store) == NAMES[:2]


def test_a_file_damaged_on_the_disk_is_not_uploaded(root: Path, store: FailingStore) -> None:
    save_steps(root, 1)
    file = root / NAMES[2] / "rank-00001.safetensors"
    flipped = bytearray(file.read_bytes())
    flipped[-1] ^= 1
    file.write_bytes(flipped)
    report = copy_checkpoints(root, store, keep=1)
    assert (report.uploaded, report.damaged) == ([], [NAMES[2]])
    assert stored_checkpoints(store) == []


def test_what_a_run_left_by_going_back_is_set_aside_in_the_store(
    root: Path, store: FailingStore, tmp_path: Path
) -> None:
    save_steps(root, 1, 2, 3)
    copy_checkpoints(root, store, keep=3)
    before = stored_content(store, NAMES[0])
    gone_back = tmp_path / "gone back"
    fetch(gone_back, store, is_wanted=lambda manifest: manifest.step == 1)
    save_steps(gone_back, 2, state={"another": "course"})
    for number in itertools.count():  # a kill anywhere
        object.__setattr__(store, "fail_at", number)
        object.__setattr__(store, "num_done", 0)
        try:
            copy_checkpoints(gone_back, store, keep=3)
        except Crash:
            continue
        break
    assert stored_checkpoints(store) == NAMES[1:]
    assert stored_content(store, NAMES[1]) == content(gone_back / NAMES[1])
    aside = {name.rpartition("/")[2]: store.read(name) for name in store.sizes(ABANDONED) if NAMES[0] in name}
    assert aside == before


def test_a_store_that_fails_is_an_error_on_all_ranks(root: Path, store: FailingStore, tmp_path: Path) -> None:
    save_steps(root, 1)
    copy_checkpoints(root, store, keep=1)

    def broken(name: str) -> Iterator[bytes]:
        raise RuntimeError("gone")
        yield b""

    object.__setattr__(store, "pieces", broken)
    elsewhere = tmp_path / "elsewhere"
    errors = in_threads(2, lambda ranks: fetch_newest(elsewhere, store, ranks, SavingRun(), on_bad=print))
    assert all(isinstance(error, CheckpointError) and "gone" in str(error) for error in errors)
    assert [path.name for path in elsewhere.iterdir()] == []
