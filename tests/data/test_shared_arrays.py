"""Arrays that processes derive from an index once, and share."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from mmtrain.data.index import shared_arrays
from mmtrain.data.index.shared_arrays import SharedArrays, SignedArray


class Fill:
    """Writes falling numbers, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, rows: SignedArray) -> None:
        self.count += 1
        rows[:] = -np.arange(len(rows))


@pytest.fixture(autouse=True)
def _shares_small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "MIN_SHARED_ROWS", 1)


def test_an_array_is_computed_once_for_all_processes(tmp_path: Path) -> None:
    fill = Fill()
    for _ in range(2):
        column = SharedArrays(tmp_path, "index").column("order", 5, 5, 9, fill)
        assert column.tolist() == [0, -1, -2, -3, -4]
        assert pickle.loads(pickle.dumps(column)).tolist() == column.tolist()
    assert fill.count == 1
    SharedArrays(tmp_path, "other").column("order", 5, 5, 9, fill)
    SharedArrays(tmp_path, "index").column("other", 5, 5, 9, fill)
    assert fill.count == 3, "another index, and another array"
    SharedArrays(tmp_path, "index").remove("order")
    assert SharedArrays(tmp_path, "index").column("order", 5, 5, 9, fill)[1] == -1
    assert fill.count == 4


def test_an_array_that_is_not_whole_is_computed_anew(tmp_path: Path) -> None:
    fill, shared = Fill(), SharedArrays(tmp_path, "index")
    shared.column("order", 5, 5, 9, fill)
    (file,) = (entry for entry in tmp_path.iterdir() if entry.name != "lock")
    file.write_bytes(file.read_bytes()[:-4])
    assert shared.column("order", 5, 5, 9, fill).tolist() == [0, -1, -2, -3, -4]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([file.name, "lock"]), "no file is left behind"


def test_large_numbers_take_eight_bytes(tmp_path: Path) -> None:
    shared = SharedArrays(tmp_path, "index")
    assert shared.column("narrow", 5, 5, (1 << 31) - 1, Fill()).stored.itemsize == 4
    assert shared.column("wide", 5, 5, 1 << 31, Fill()).stored.itemsize == 8


@pytest.mark.parametrize("folder", [None, Path("/dev/null/nowhere")])
def test_without_a_folder_each_process_has_its_own(folder: Path | None) -> None:
    shared = SharedArrays(folder, "index")
    assert shared.column("order", 5, 5, 9, Fill()).tolist() == [0, -1, -2, -3, -4]
    counts = shared.counts("groups", 3, 3)
    counts[1] = 7
    assert counts.missing() == [0, 2]
    shared.remove("order")


def test_counts_that_one_process_finds_are_known_to_all(tmp_path: Path) -> None:
    first, second = (SharedArrays(tmp_path, "index").counts("groups", 4, 4) for _ in range(2))
    first[2] = 9
    assert second[2] == 9
    assert second.missing() == [0, 1, 3]
    received = pickle.loads(pickle.dumps(second))
    received[0] = 5
    assert first.all().tolist() == [5, 0, 9, 0]
    assert SharedArrays(tmp_path, "other").counts("groups", 4, 4).missing() == [0, 1, 2, 3]
