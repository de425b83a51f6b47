"""A checkpoint can be read in any sharding on any number of ranks, and the newest good checkpoints are kept."""

import hashlib
import json
import multiprocessing
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from mmtrain import __version__
from mmtrain.checkpoint import (
    BEST_STEP,
    SUSPECT_SINCE,
    Checkpoint,
    Ranks,
    Shard,
    ShardSpec,
    Snapshot,
    find,
    is_trusted,
    latest,
    open_chosen,
    open_newest_good,
    save,
    verify,
)
from mmtrain.errors import CheckpointError
from mmtrain.written_by import WRITTEN_BY
from tests.checkpoint.conftest import in_threads, shards_of, weights

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float16]


def refuse(text: str) -> None:
    raise AssertionError(text)


def save_alone(root: Path, step: int, keep: int = 2) -> Path:
    return save(
        root, Snapshot(step, shards_of(step, 0, 1), {"at": step}, {"rng": "ab"}), keep=keep, ranks=Ranks.alone()
    )


def reopen(root: Path) -> Checkpoint:
    bad: list[str] = []
    checkpoint = open_newest_good(root, bad.append)
    assert not bad
    return checkpoint


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[ShardSpec]]:
    """Draw a shape and pieces that cover it once: rows along one dim, some of them cut again into flat ranges."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    rows = [ShardSpec(shape)]
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        inner = draw(st.sets(st.integers(1, shape[dim]), max_size=3)) - {shape[dim]}
        cuts = [0, *sorted(inner), shape[dim]]
        rows = [ShardSpec(shape, dim, lo, hi) for lo, hi in pairwise(cuts)]
    pieces: list[ShardSpec] = []
    for spec in rows:
        if not draw(st.booleans()):
            pieces.append(spec)
            continue
        cuts = [0, *sorted(draw(st.lists(st.integers(0, spec.size), max_size=3))), spec.size]
        pieces += [ShardSpec(shape, spec.dim, spec.start, spec.stop, (lo, hi)) for lo, hi in pairwise(cuts) if lo < hi]
    return shape, pieces


def cut(full: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    box = full if spec.dim is None else full.narrow(spec.dim, spec.start, spec.stop - spec.start)
    return box if spec.flat is None else box.reshape(-1)[spec.flat[0] : spec.flat[1]]


@given(st.data(), tilings(), st.sampled_from(DTYPES), st.integers(0, 2**32 - 1))
def test_any_piece_is_read_from_any_tiling(
    data: st.DataObject, tiling: tuple[tuple[int, ...], list[ShardSpec]], dtype: torch.dtype, seed: int
) -> None:
    shape, pieces = tiling
    full = torch.randint(256, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with tempfile.TemporaryDirectory() as folder:
        save(
            Path(folder),
            Snapshot(1, [Shard("w", spec, cut(full, spec)) for spec in pieces]),
            keep=1,
            ranks=Ranks.alone(),
        )
        checkpoint = reopen(Path(folder))
        for spec in [*pieces, ShardSpec(shape), *data.draw(st.lists(specs_of(shape), max_size=4))]:
            piece = checkpoint.read("w", spec)
            assert piece.dtype == dtype
            assert torch.equal(piece, cut(full, spec)), spec


@st.composite
def specs_of(draw: st.DrawFn, shape: tuple[int, ...]) -> ShardSpec:
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    start, stop = (0, 0) if dim is None else sorted(draw(st.tuples(*[st.integers(0, shape[dim])] * 2)))
    rows = ShardSpec(shape, dim, start, stop)
    lo, hi = sorted(draw(st.tuples(*[st.integers(0, rows.size)] * 2)))
    return ShardSpec(shape, dim, start, stop, (lo, hi)) if draw(st.booleans()) else rows


def test_two_ranks_save_and_one_rank_reads(root: Path) -> None:
    folders = in_threads(
        2,
        lambda ranks: save(
            root, Snapshot(7, shards_of(7, ranks.rank, 2), {"at": 7}, {"r": ranks.rank}), keep=2, ranks=ranks
        ),
    )
    assert folders == [root / "step-00000007"] * 2
    checkpoint = reopen(root)
    assert torch.equal(checkpoint.read("llm.w", ShardSpec((4, 6))), weights(7))
    assert checkpoint.read("count", ShardSpec(())).item() == 7
    assert (checkpoint.step, checkpoint.world_size, checkpoint.state) == (7, 2, {"at": 7})
    assert [checkpoint.rank_state(rank) for rank in (0, 1)] == [{"r": 0}, {"r": 1}]
    assert checkpoint.names() == ["count", "llm.w"]
    assert checkpoint.full_shape("llm.w") == (4, 6)
    with pytest.raises(CheckpointError, match="saved by 2 ranks; there is no rank 2"):
        checkpoint.rank_state(2)


def test_two_ranks_open_the_same_checkpoint_and_only_rank_0_reports(root: Path) -> None:
    for step in (1, 2):
        in_threads(2, lambda ranks, s=step: save(root, Snapshot(s, shards_of(s, ranks.rank, 2)), keep=2, ranks=ranks))
    (root / "step-00000002" / "rank-00001.json").unlink()
    reports: list[str] = []
    opened = in_threads(2, lambda ranks: open_newest_good(root, reports.append, ranks))
    assert [checkpoint.step for checkpoint in opened] == [1, 1]
    assert len(reports) == 1


def test_the_files_are_plain_safetensors_and_json(root: Path) -> None:
    folder = save_alone(root, 3)
    tensors = load_file(folder / "rank-00000.safetensors")
    assert torch.equal(tensors["llm.w|0[0:4]"], weights(3))
    assert json.loads((folder / "manifest.json").read_text())["manifest"]["step"] == 3
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00000.safetensors",
    ]


def test_equal_states_give_equal_bytes(root: Path) -> None:
    first = save_alone(root / "first", 3)
    second = save_alone(root / "second", 3)
    names = [file.name for file in first.iterdir()]
    assert len(names) == 3
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_changing_a_read_tensor_leaves_the_file_unchanged(root: Path) -> None:
    folder = save_alone(root, 1)
    tensor = reopen(root).read("llm.w", ShardSpec((4, 6), 0, 0, 4))
    tensor.zero_()
    assert verify(folder) == []


def test_retention_keeps_the_newest_and_latest_names_the_newest(root: Path) -> None:
    for step in range(1, 6):
        assert save_alone(root, step, keep=3) == latest(root)
    assert [folder.name for folder in find(root)] == ["step-00000005", "step-00000004", "step-00000003"]
    assert {path.name for path in root.iterdir()} - {folder.name for folder in find(root)} == {"latest"}


@pytest.mark.parametrize("keep", [1, 2])
def test_no_checkpoint_is_removed_while_a_kept_one_is_damaged(root: Path, keep: int) -> None:
    save_alone(root, 1, keep=2)
    damaged = save_alone(root, 2, keep=2)
    flip(damaged / "rank-00000.safetensors", -1)
    save_alone(root, 3, keep=2)
    assert [folder.name[-1] for folder in find(root)] == ["3", "2", "1"]
    save_alone(root, 4, keep=keep)  # now `keep` good checkpoints are newer
    assert [folder.name[-1] for folder in find(root)] == ["4", "3"][:keep]


@pytest.mark.parametrize("kind", ["empty", "file", "damaged", "renamed"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_folder_that_claims_a_later_step_stops_nothing(root: Path, kind: str, keep: int) -> None:
    foreign = root / "step-99999999"
    root.mkdir()
    if kind == "empty":
        foreign.mkdir()
    elif kind == "file":
        foreign.touch()
    else:
        save_alone(root, 99_999_999 if kind == "damaged" else 7).rename(foreign)
    if kind == "damaged":
        flip(foreign / "rank-00000.safetensors", -1)
    for step in range(1, 5):
        assert save_alone(root, step, keep=keep) == latest(root)
    assert [folder.name[-1] for folder in find(root)] == ["9", "4", "3"][: keep + 1]
    reports: list[str] = []
    assert open_newest_good(root, reports.append).step == 4
    [report] = reports
    assert report.startswith(f"checkpoint {foreign} is damaged and not used: ")
    if kind == "renamed":
        assert report.endswith("manifest.json: is of step 7, unlike the name of its folder step-99999999")


def seal(body: dict[str, Any]) -> bytes:
    """Make a manifest of any content, with the sum that belongs to it."""
    text = json.dumps(body).encode()
    return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(text).hexdigest().encode(), text)


def test_a_manifest_with_a_good_sum_and_any_missing_or_wrong_part_is_named(root: Path) -> None:
    folder = save_alone(root, 1)
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    assert verify(folder) == []
    for key in body.keys() - {WRITTEN_BY}:  # which only messages name
        for wrong in (None, 7, -1, "x", [], {"x": 1}, {"../x": [1, "x"]}, {"x": {}}):
            path.write_bytes(seal({name: value for name, value in body.items() if name != key}))
            assert verify(folder) == [f"manifest.json: lacks '{key}'"]
            if key != "state" or not isinstance(wrong, dict):
                path.write_bytes(seal(body | {key: wrong}))
                [problem] = verify(folder)
                assert problem.startswith("manifest.json: "), (key, wrong)
    for name in body["tensors"]["llm.w"]:
        without = {key: value for key, value in body["tensors"]["llm.w"].items() if key != name}
        path.write_bytes(seal(body | {"tensors": {"llm.w": without}}))
        [problem] = verify(folder)
        assert problem.startswith("manifest.json: is not what mmtrain writes: ")
        assert name in problem


def test_a_checkpoint_without_the_state_that_is_needed_is_passed_over(root: Path) -> None:
    save(root, Snapshot(1, shards_of(1, 0, 1), {"next_step": 1}), keep=2, ranks=Ranks.alone())
    save(root, Snapshot(2, shards_of(2, 0, 1), {}), keep=2, ranks=Ranks.alone())
    reports: list[str] = []
    assert open_newest_good(root, reports.append, required_state=["next_step"]).step == 1
    [report] = reports
    assert report.endswith("step-00000002 is damaged and not used: manifest.json: its state lacks 'next_step'")


def test_a_step_saved_again_gets_its_own_folder(root: Path) -> None:
    first = save_alone(root, 5, keep=3)
    flip(first / "rank-00000.safetensors", -1)
    again = save_alone(root, 5, keep=3)
    assert again.name == "step-00000005-2"
    assert latest(root) == again
    assert reopen(root).folder == again
    assert save_alone(root, 5, keep=3).name == "step-00000005-3"
    assert save_alone(root, 6, keep=1).name == "step-00000006"
    assert find(root) == [root / "step-00000006"]


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def test_every_changed_byte_is_detected(root: Path) -> None:
    """Covers each byte of each file: lengths, headers, padding, values, the manifest's own sum and its frame."""
    folder = save_alone(root, 1)
    for file in sorted(folder.iterdir()):
        size = file.stat().st_size
        for position in range(size):
            flip(file, position, 0x20 if position % 2 else 1)
            problems = verify(folder)
            assert len(problems) == 1, (file, position)
            assert problems[0].startswith(f"{file.name}: ")
            flip(file, position, 0x20 if position % 2 else 1)
    assert verify(folder) == []


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("rank-00000.safetensors", "flip", "SHA-256"),
        ("rank-00000.safetensors", "remove", "missing"),
        ("rank-00000.safetensors", "shorten", "bytes, the manifest says"),
        ("rank-00000.json", "flip", "SHA-256"),
        ("rank-00000.json", "remove", "missing"),
        ("manifest.json", "flip", "damaged"),
        ("manifest.json", "remove", "missing"),
        ("manifest.json", "shorten", "cut short"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    root: Path, file: str, damage: str, words: str
) -> None:
    save_alone(root, 1)
    newest = save_alone(root, 2) / file
    if damage == "flip":
        flip(newest, 100 if file == "manifest.json" else 3)
    elif damage == "remove":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[:-1])
    reports: list[str] = []
    checkpoint = open_newest_good(root, reports.append)
    assert checkpoint.step == 1
    assert torch.equal(checkpoint.read("llm.w", ShardSpec((4, 6))), weights(1))
    assert len(reports) == 1
    assert f"step-00000002 is damaged and not used: {file}: " in reports[0]
    assert words in reports[0]


def test_without_a_good_checkpoint_opening_is_an_error(root: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        open_newest_good(root, print)
    flip(save_alone(root, 1) / "rank-00000.json", 0)
    reports: list[str] = []
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        open_newest_good(root, reports.append)
    assert len(reports) == 1


def test_wrong_names_and_shapes_name_the_tensor(root: Path) -> None:
    save_alone(root, 1)
    checkpoint = reopen(root)
    with pytest.raises(CheckpointError, match=r"llm\.v: not in checkpoint"):
        checkpoint.read("llm.v", ShardSpec((4, 6)))
    with pytest.raises(CheckpointError, match=r"llm\.w: has shape \[4, 6\] .* but \[4, 7\] in this model"):
        checkpoint.read("llm.w", ShardSpec((4, 7)))


def test_pieces_that_miss_or_repeat_elements_are_rejected_when_saved(root: Path) -> None:
    half = Shard("w", ShardSpec((4, 6), 0, 0, 2), torch.zeros(2, 6))
    with pytest.raises(CheckpointError, match=r"w: the ranks' pieces hold 12 elements, the tensor has 24"):
        save(root, Snapshot(1, [half]), keep=1, ranks=Ranks.alone())
    whole = Shard("w", ShardSpec((4, 6)), torch.zeros(4, 6))
    with pytest.raises(CheckpointError, match="hold 36 elements"):
        save(root, Snapshot(1, [half, whole]), keep=1, ranks=Ranks.alone())
    assert list(root.iterdir()) == []


def test_a_gap_hidden_by_a_repetition_is_rejected_when_read(root: Path) -> None:
    half = Shard("w", ShardSpec((4, 6), 0, 0, 2), torch.zeros(2, 6))
    same = Shard("w", ShardSpec((4, 6), 0, 0, 2, (0, 12)), torch.zeros(12))
    save(root, Snapshot(1, [half, same]), keep=1, ranks=Ranks.alone())
    with pytest.raises(CheckpointError, match=r"w: .* holds only 12 of the 24 elements of piece whole"):
        reopen(root).read("w", ShardSpec((4, 6)))


def test_ranks_that_disagree_raise_the_same_error(root: Path) -> None:
    def work(ranks: Ranks) -> Path:
        dtype = torch.float32 if ranks.rank else torch.bfloat16
        spec = ShardSpec((4,), 0, 2 * ranks.rank, 2 * ranks.rank + 2)
        return save(root, Snapshot(1, [Shard("w", spec, torch.zeros(2, dtype=dtype))]), keep=1, ranks=ranks)

    errors = in_threads(2, work)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all("w: rank 1 has float32 [4], a lower rank bfloat16 [4]" in str(error) for error in errors)
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("state", [{"x": float("nan")}, {"x": torch.zeros(1)}])
def test_a_state_that_is_not_json_is_rejected(root: Path, state: dict) -> None:
    with pytest.raises(CheckpointError, match=r"saving step 1: .*JSON"):
        save(root, Snapshot(1, [], state), keep=1, ranks=Ranks.alone())
    with pytest.raises(CheckpointError, match=r"saving step 1: rank 0: .*JSON"):
        save(root, Snapshot(1, [], {}, state), keep=1, ranks=Ranks.alone())


def test_every_piece_that_is_written_and_read_is_reported(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmtrain.checkpoint.storage.PIECE_BYTES", 40)
    pieces: list[tuple[str, int]] = []

    def note(path: Path, num_bytes: int) -> None:
        pieces.append((path.name, num_bytes))

    for step in (1, 2, 3):
        pieces.clear()
        snapshot = Snapshot(step, shards_of(step, 0, 1), {}, {})
        save(root, snapshot, keep=2, ranks=Ranks.alone(), progress=note)
    written = [num_bytes for name, num_bytes in pieces if name == "rank-00000.safetensors"]
    folder = root / "step-00000003"
    size = (folder / "rank-00000.safetensors").stat().st_size
    assert sum(written) == 2 * size, "once written, and once read in the checkpoint before"
    assert len([num_bytes for num_bytes in written if num_bytes == 40]) > size // 80
    pieces.clear()
    open_newest_good(root, print, progress=note).read("llm.w", ShardSpec((4, 6)))
    assert sum(num_bytes for _, num_bytes in pieces) == 96 + sum(
        path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"
    )


def test_the_newest_checkpoint_that_is_not_suspect_is_kept_beside_the_newest(root: Path) -> None:
    for step, suspect_since in ((1, None), (2, None), (3, 3), (4, 3), (5, 3)):
        save(root, Snapshot(step, shards_of(step, 0, 1), {SUSPECT_SINCE: suspect_since}), keep=1, ranks=Ranks.alone())
    assert [folder.name for folder in find(root)] == ["step-00000005", "step-00000002"]
    assert [is_trusted(folder) for folder in find(root)] == [False, True]
    save_alone(root, 6, keep=1)
    assert [folder.name for folder in find(root)] == ["step-00000006"], "it takes the place of both"


def test_the_best_checkpoint_that_a_kept_one_names_is_kept(root: Path) -> None:
    """A run that goes back to an older checkpoint still has the one that was the best then."""
    kept_after = []
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 4), (5, 4)):
        save(root, Snapshot(step, shards_of(step, 0, 1), {BEST_STEP: best}), keep=2, ranks=Ranks.alone())
        kept_after.append([int(folder.name[-1]) for folder in find(root)])
    assert kept_after == [[1], [2, 1], [3, 2, 1], [4, 3, 1], [5, 4]]
    assert open_chosen(root, "best", refuse).step == 4
    assert open_chosen(root, "newest", refuse).step == 5
    assert open_chosen(root, 4, refuse).step == 4


def test_a_best_checkpoint_that_is_damaged_or_unknown_is_named(root: Path) -> None:
    save_alone(root, 1)
    with pytest.raises(CheckpointError, match=r"says which one is the best: train\.best\.metric"):
        open_chosen(root, "best", refuse)
    best = save(root, Snapshot(2, shards_of(2, 0, 1), {BEST_STEP: 2}), keep=2, ranks=Ranks.alone())
    save(root, Snapshot(3, shards_of(3, 0, 1), {BEST_STEP: 2}), keep=2, ranks=Ranks.alone())
    (best / "rank-00000.safetensors").write_bytes(b"")
    reports: list[str] = []
    with pytest.raises(
        CheckpointError, match=r"no good checkpoint of step 2 in .*; there are checkpoints of steps 2, 3"
    ):
        open_chosen(root, "best", reports.append)
    assert len(reports) == 1
    assert f"checkpoint {best} is damaged and not used" in reports[0]


def test_ranks_open_the_best_checkpoint_together(root: Path) -> None:
    for step in (1, 2):
        in_threads(2, lambda ranks, step=step: save(
            root, Snapshot(step, shards_of(step, ranks.rank, 2), {BEST_STEP: 1}), keep=2, ranks=ranks
        ))  # fmt: skip
    opened = in_threads(2, lambda ranks: open_chosen(root, "best", refuse, ranks).step)
    assert opened == [1, 1]


def test_a_newer_checkpoint_of_another_format_is_not_passed_over(root: Path) -> None:
    """An older good one would be opened without a word, and the steps after it lost."""
    save_alone(root, 1)
    folder = save_alone(root, 2)
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())["manifest"]
    path.write_bytes(seal(body | {"format": 2, WRITTEN_BY: "9.1"}))
    reports: list[str] = []
    message = f"{folder} is of format 2, written by mmtrain 9.1; this is mmtrain {__version__}, which reads format 1; "
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_newest_good(root, reports.append)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_chosen(root, 2, reports.append)
    assert reports == []
    assert open_chosen(root, 1, reports.append).step == 1


def saved_steps(root: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in find(root)]


def test_a_checkpoint_that_is_read_is_removed_later(root: Path) -> None:
    save_alone(root, 1, keep=1)
    first = open_newest_good(root, refuse)
    save_alone(root, 2, keep=1)
    assert saved_steps(root) == [2, 1]
    assert torch.equal(first.read("llm.w", ShardSpec((4, 6))), weights(1))
    second = open_newest_good(root, refuse)
    first.close()
    save_alone(root, 3, keep=1)
    assert [int(folder.name.removeprefix("step-")) for folder in find(root)] == [3, 2], (
        "two, which is read, and not one"
    )
    del second
    save_alone(root, 4, keep=1)
    assert saved_steps(root) == [4]


@pytest.mark.slow  # 10 s
def test_readers_beside_a_run_find_whole_checkpoints(root: Path) -> None:
    """The run is another process: it saves again and again, and keeps one checkpoint."""
    context = multiprocessing.get_context("fork")
    over = context.Event()
    save_alone(root, 1, keep=1)
    run = context.Process(target=_save_until, args=(root, over))
    run.start()
    try:
        seen = set()
        while len(seen) < 15:
            checkpoint = open_newest_good(root, refuse)
            step = checkpoint.step
            seen.add(step)
            assert torch.equal(checkpoint.read("llm.w", ShardSpec((4, 6))), weights(step))
    finally:
        over.set()
        run.join()
    assert run.exitcode == 0


def _save_until(root: Path, over: Any) -> None:
    step = 2
    while not over.is_set():
        save_alone(root, step, keep=1)
        step += 1
