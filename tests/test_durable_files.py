"""Files are old or new, never half; logs give back every entry that can be read."""

import errno
from pathlib import Path

import pytest

from mmtrain.durable_files import append_line, cut_log, disk_errors_named, read_log, set_aside, write_whole
from mmtrain.errors import RunError
from tests.full_disk import full_disk


def test_a_write_that_fails_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_whole(path, "old")
    message = f"^{path}: File too large; raise the limit"
    with pytest.raises(RunError, match=message), disk_errors_named(tmp_path), full_disk(8):
        write_whole(path, "new and longer")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_errors_that_are_not_the_disks_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors_named(tmp_path / "run"):
        (tmp_path / "data.json").read_text()
    with pytest.raises(RunError, match=f"^{tmp_path}: No space left"), disk_errors_named(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', "\0\0\0"])
def test_a_line_that_a_kill_cut_short_is_cut_and_said(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, '{"step": 1}')
    append_line(path, '{"step": 2}')
    path.write_text(path.read_text() + torn)
    assert read_log(path).num_damaged == 0
    notes: list[str] = []
    cut_log(path, lambda entry: entry["step"] < 2, notes.append)
    assert path.read_text() == '{"step": 1}\n'
    said = [f"{path}: its last line has no end, as a kill or a full disk leaves one, and is dropped"] if torn else []
    assert (notes, len(list(tmp_path.iterdir()))) == (said, 1)


@pytest.mark.parametrize("garbage", [b"{", b"[1]", b"7", b"null", b"", b"\xff\xfe", b'{"other": 1}', b"\0" * 4096])
def test_a_log_with_garbage_is_set_aside_and_its_entries_stay(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "log.jsonl"
    content = b'{"step": 1}\n' + garbage + b'\n{"step": 2}\n'
    path.write_bytes(content)
    for number in (1, 2):
        notes: list[str] = []
        cut_log(path, lambda _: True, notes.append, lambda entry: "step" in entry)
        assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
        assert (tmp_path / f"log.jsonl.damaged-{number}").read_bytes() == content
        assert notes == [
            f"{path} is damaged and set aside as log.jsonl.damaged-{number}: 1 of its lines cannot be read; the others "
            "are kept"
        ]
        path.write_bytes(content)


def test_a_log_that_does_not_exist_is_empty_and_stays_away(tmp_path: Path) -> None:
    cut_log(tmp_path / "log.jsonl", lambda _: True, pytest.fail)
    assert read_log(tmp_path / "log.jsonl").entries == []
    assert list(tmp_path.iterdir()) == []


def test_a_device_in_the_place_of_a_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/zero")  # it has no end
    cut_log(path, lambda _: True, pytest.fail)
    assert path.is_symlink()


def test_files_are_set_aside_under_a_new_name(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / "plan.json").write_text(str(number))
        assert f"plan.json.damaged-{number}: why" in set_aside(tmp_path / "plan.json", "why")
        assert (tmp_path / f"plan.json.damaged-{number}").read_text() == str(number)
