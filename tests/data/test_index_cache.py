"""The cached index: equal to a new one, and rebuilt as soon as anything that it depends on changes."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance.columns import StoredColumn
from mmtrain.data import DataIndex, GroupStream, build_index
from mmtrain.data.formats.sample import Sample, Turn
from mmtrain.data.index import data_index as index_module
from mmtrain.data.index import index_cache, shared_arrays
from mmtrain.data.index.sample_table import SampleTable, content_json, sample_from_record, sample_record
from mmtrain.data.media.item_readers import ITEM_READERS
from mmtrain.data.media.media_bytes import BadMediaError, FileMedia, ParquetCell, TarMember
from mmtrain.errors import TooManyBadSamples
from mmtrain.recipe.settings.schema import Recipe
from tests.data.rows import row

Picture = Callable[..., Path]
MakeRecipe = Callable[..., Recipe]
MEDIA = st.one_of(
    st.builds(FileMedia, st.text()),
    st.builds(TarMember, st.text(), st.text(), st.integers(0), st.integers(0)),
    st.builds(ParquetCell, st.text(), st.integers(0), st.integers(0), st.text(), st.none() | st.integers(0)),
)
TURNS = st.lists(st.builds(Turn, st.sampled_from(["system", "user", "assistant"]), st.text())).map(tuple)
SAMPLES = st.builds(
    Sample,
    st.text(),
    st.text(),
    st.integers(0),
    TURNS,
    st.lists(MEDIA, max_size=3).map(tuple),
    st.none() | st.text(),
    st.lists(MEDIA, max_size=3).map(tuple),
    st.lists(MEDIA, max_size=3).map(tuple),
)


@given(st.lists(SAMPLES, max_size=4))
def test_samples_survive_as_records(samples: list[Sample]) -> None:
    records = [sample_record(sample, content_json(sample)) for sample in samples]
    assert list(map(sample_from_record, records)) == samples
    table = SampleTable(b"".join(records), np.cumsum([len(record) for record in records]))
    assert list(table) == samples
    assert table[::-1] == samples[::-1]
    assert list(pickle.loads(pickle.dumps(table))) == samples
    if samples:
        assert table[-1] == table[np.int64(len(samples) - 1)] == samples[-1]
    with pytest.raises(IndexError):
        table[len(samples)]


@pytest.fixture
def made(picture: Picture, recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Make a small dataset that is cached as if it were large, in a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1)
    picture("a.png", 16, 24)
    rows = [row("<image>x<image>", "red", "a.png", "a.png", name="two"), row("1 + 2", "3"), row("<image>", "a", "no")]
    return recipe(rows)


def same(left: DataIndex, right: DataIndex) -> bool:
    return (
        list(left.samples) == list(right.samples)
        and left.fingerprint == right.fingerprint
        and left.quarantined == right.quarantined
        and {u: p.tolist() for u, p in left.item_parts.items()} == {u: p.tolist() for u, p in right.item_parts.items()}
    )


class Reads:
    """Counts how often the sources are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        measure_samples = index_module.measure_samples

        def counted(*args: Any) -> Any:
            self.count += 1
            return measure_samples(*args)

        monkeypatch.setattr(index_module, "measure_samples", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, in_one_process: None) -> Reads:
    return Reads(monkeypatch)


def cached_indexes(folder: Path) -> list[Path]:
    return [entry for entry in (folder / index_cache.INDEX_FOLDER_NAME).iterdir() if entry.is_dir()]


def test_the_cached_index_is_the_one_that_was_built(made: Recipe, tmp_path: Path, reads: Reads) -> None:
    first, second = build_index(made), build_index(made)
    assert reads.count == 1
    assert same(first, second)
    assert len(second.quarantined) == 1
    assert second.samples[0].images == (FileMedia(str(tmp_path / "a.png")),) * 2
    small = index_cache.MIN_SOURCE_BYTES
    index_cache.MIN_SOURCE_BYTES = 1 << 30
    try:
        assert same(build_index(made), first), "as without a cache"
    finally:
        index_cache.MIN_SOURCE_BYTES = small
    assert same(pickle.loads(pickle.dumps(second)), first)


def test_an_index_that_came_with_the_data_is_not_trusted(
    made: Recipe, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "somebody else"))
    build_index(made)
    assert reads.count == 2
    secret = tmp_path / "somebody else" / "mmtrain" / "secret"
    assert len(bytes.fromhex(secret.read_text())) == 16
    assert secret.stat().st_mode & 0o077 == 0
    build_index(made)
    assert reads.count == 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    build_index(made)
    build_index(made)
    assert reads.count == 4, "without a secret there is no index beside data"
    named = changed(made, index_cache=tmp_path / "mine")
    build_index(named)
    build_index(named)
    assert reads.count == 5, "a folder that the user names is trusted"


def changed(recipe: Recipe, **data: Any) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=data)})


def test_only_changes_that_affect_lengths_rebuild_the_index(
    made: Recipe, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_index(made)
    train = made.train.model_copy(update={"steps": 99, "seed": 5})
    build_index(made.model_copy(update={"train": train}))
    build_index(changed(made, grouping_window=5, grouping="isf", max_bad_rate=0.9))
    source = made.data.sources[0].model_copy(update={"weight": 3.0})
    assert build_index(changed(made, sources=(source,))).weights.tolist() == [3, 3]
    assert reads.count == 1
    with pytest.raises(TooManyBadSamples):
        build_index(changed(made, max_bad_rate=0.1))
    build_index(changed(made, seq_len=63))
    assert reads.count == 2
    build_index(changed(made, image=made.data.image.model_copy(update={"max_pixels": 900})))
    assert reads.count == 3
    path = tmp_path / "train.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps(rows[:1]))
    assert len(build_index(made).samples) == 1
    assert reads.count == 4
    before = path.stat()
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace('"red"', '"rot"'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert build_index(made).samples[0].answer == "rot", "with the time and the size of before"
    assert reads.count == 5
    monkeypatch.setattr(index_cache, "_library_versions", lambda: {"av": "another"})
    build_index(made)
    assert reads.count == 6
    monkeypatch.setattr(index_cache, "_code_sha256", lambda: "another version")
    build_index(made)
    assert reads.count == 7
    assert len(cached_indexes(tmp_path)) == index_cache.MAX_INDEXES_PER_FOLDER, "old ones are removed"


@pytest.mark.parametrize("name", ["samples.bin", "arrays.safetensors", "media.safetensors", "rest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_broken_index_is_reported_and_rebuilt(
    made: Recipe, tmp_path: Path, reads: Reads, name: str, damage: str
) -> None:
    first = build_index(made)
    first = replace(first, samples=list(first.samples))  # a table would read the file that is damaged below
    (place,) = cached_indexes(tmp_path)
    content = bytearray((place / name).read_bytes())
    content[len(content) // 2] ^= 0x10
    match damage:
        case "cut":
            os.truncate(place / name, len(content) // 2)
        case "flip":
            (place / name).write_bytes(content)
        case "gone":
            (place / name).unlink()
    messages: list[str] = []
    second = build_index(made, notify=messages.append)
    if reads.count == 1:
        assert (name, damage) == ("rest.json", "flip"), "a changed byte in a text of the JSON is not noticed"
        return
    assert same(second, first)
    assert len(messages) == 1
    assert str(place) in messages[0]
    assert "is broken" in messages[0]
    assert same(build_index(made, notify=messages.append), first)
    assert (reads.count, len(messages)) == (2, 1)


def test_an_index_that_cannot_be_cached_is_still_built(
    made: Recipe, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    messages: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(index_cache, "save_file", full)
        index = build_index(made, notify=messages.append)
    assert len(index.samples) == 2
    (message,) = messages
    assert message.startswith(
        f"the index cannot be cached in {tmp_path / index_cache.INDEX_FOLDER_NAME} (data.index_cache sets"
    )
    assert message.endswith("No space left on device")
    assert cached_indexes(tmp_path) == [], "no unfinished index stays"
    (tmp_path / "file").write_text("")
    assert same(build_index(changed(made, index_cache=tmp_path / "file"), notify=messages.append), index), (
        "a folder that cannot be"
    )
    assert str(tmp_path / "file") in messages[1]
    count = reads.count
    os.chmod(tmp_path / index_cache.INDEX_FOLDER_NAME, 0o500)
    build_index(changed(made, index_cache=tmp_path / index_cache.INDEX_FOLDER_NAME))
    os.chmod(tmp_path / index_cache.INDEX_FOLDER_NAME, 0o700)
    assert reads.count == count + 1, "not cached before"
    assert same(build_index(changed(made, index_cache=tmp_path / "new" / "folder")), index)
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 2, "the index and its lock"


def test_small_sources_are_not_cached(recipe: MakeRecipe, tmp_path: Path) -> None:
    build_index(recipe([row("1 + 2", "3")]))
    assert not (tmp_path / index_cache.INDEX_FOLDER_NAME).exists()


def test_media_that_change_come_or_go_are_noticed(made: Recipe, picture: Picture, tmp_path: Path, reads: Reads) -> None:
    """The cached index is built anew with a note that names the first of them."""
    before = build_index(made)
    assert len(before.quarantined) == 1
    notes: list[str] = []
    (tmp_path / "no").write_bytes((tmp_path / "a.png").read_bytes())  # the file that was missing
    added = build_index(made, notify=notes.append)
    assert not added.quarantined
    assert len(added.samples) == 3
    assert notes == [
        "1 of 2 media files have changed since they were indexed, the first: "
        f"{tmp_path / 'no'}; reading all lengths anew"
    ]
    picture("a.png", 32, 48)
    replaced = build_index(made)
    rows = replaced.lengths.items["vision"].rows.tolist()
    assert rows[:2] != before.lengths.items["vision"].rows.tolist()[:2]
    (tmp_path / "no").unlink()
    assert len(build_index(made).quarantined) == 1
    assert reads.count == 4
    assert same(build_index(made), build_index(made))
    assert reads.count == 4, "nothing has changed"
    assert "remove that folder" in build_index(made).remarks()[0]


def test_a_picture_with_the_size_and_time_of_before_is_noticed(made: Recipe, tmp_path: Path, reads: Reads) -> None:
    build_index(made)
    path = tmp_path / "a.png"
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    build_index(made)
    assert reads.count == 2


def test_the_target_of_a_link_is_looked_at(
    picture: Picture, recipe: MakeRecipe, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1)
    picture("small.png", 16, 24)
    picture("large.png", 32, 48)
    (tmp_path / "a.png").symlink_to("small.png")
    made = recipe([row("<image>", "red", "a.png")])
    small = build_index(made).lengths.items["vision"].rows.tolist()
    (tmp_path / "a.png").unlink()
    (tmp_path / "a.png").symlink_to("large.png")
    assert build_index(made).lengths.items["vision"].rows.tolist() != small
    picture("large.png", 16, 24)
    assert build_index(made).lengths.items["vision"].rows.tolist() == small
    assert reads.count == 3


def test_ranks_that_start_together_look_at_media_once(made: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    find_changed = index_cache.find_changed
    monkeypatch.setattr(index_cache, "find_changed", lambda arrays: (looks.append(1), find_changed(arrays))[1])
    build_index(made)
    ranks = [index_cache.IndexCache.for_recipe(made, made.data.sources) for _ in range(3)]
    for rank in ranks:
        assert rank is not None
        assert rank.load(print) is not None
    assert len(looks) == 1
    build_index(made)
    assert len(looks) == 2, "a later run looks again"


def test_ranks_that_start_together_compare_checksums_once(made: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Path] = []
    file_sha256 = index_cache._file_sha256
    build_index(made)
    monkeypatch.setattr(index_cache, "_file_sha256", lambda path: (sums.append(path), file_sha256(path))[1])
    for rank in [index_cache.IndexCache.for_recipe(made, made.data.sources) for _ in range(3)]:
        assert rank is not None
        assert rank.load(print) is not None
    assert len(sums) == 3, "records, lengths and media"


def test_of_a_large_file_blocks_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "SUMMED_BLOCK_BYTES", 10)
    monkeypatch.setattr(index_cache, "SUMMED_BLOCKS", 3)

    def sha256(content: bytes) -> str:
        (tmp_path / "file").write_bytes(content)
        return index_cache._file_sha256(tmp_path / "file")

    small = sha256(bytes(30))
    assert all(sha256(bytes(i) + b"x" + bytes(29 - i)) != small for i in range(30)), "all of a small one"
    large = sha256(bytes(95))
    assert large not in (sha256(bytes(94)), sha256(bytes(96)), sha256(b"x" + bytes(94)), sha256(bytes(94) + b"x"))
    assert sum(sha256(bytes(i) + b"x" + bytes(94 - i)) != large for i in range(95)) == 25, "two blocks and the last"


def test_processes_map_a_cached_index_and_derive_the_same_order(
    made: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the process that built it; a second one finds the order of its stream."""
    monkeypatch.setattr(shared_arrays, "MIN_SHARED_ROWS", 1)
    indexes = [build_index(made), build_index(made)]
    for index in indexes:
        column = index.lengths.tokens
        assert isinstance(column, StoredColumn)
        assert index_cache.INDEX_FOLDER_NAME.encode() in pickle.dumps(column), "by the name of its file"
    (place,) = cached_indexes(tmp_path)
    before = set(place.iterdir())
    streams = [GroupStream.of(made, index) for index in indexes]
    derived = set(place.iterdir()) - before
    assert len(derived) == 3, "an order, counts and a lock, for both"
    without_files = GroupStream.of(made, replace(indexes[0], folder=None))
    expected = [group.tolist() for group in without_files.groups(0, 9)]
    for stream in streams:
        assert [group.tolist() for group in stream.groups(0, 9)] == expected
    assert set(place.iterdir()) == before | derived
    assert same(build_index(made), indexes[0]), "the index is still whole"


def test_lengths_of_many_samples_are_collected_in_blocks(
    made: Recipe, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row("<image>" * (i % 3), "a" * (i + 1), *["a.png"] * (i % 3)) for i in range(11)]
    whole = build_index(recipe(rows))
    monkeypatch.setattr(index_module, "BLOCK_ROWS", 4)
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 1 << 30)
    in_blocks = build_index(recipe(rows))
    assert same(whole, in_blocks)
    items = [index.lengths.items["vision"].first for index in (whole, in_blocks)]
    assert items[0].tolist() == items[1].tolist() == np.cumsum([0] + [i % 3 for i in range(11)]).tolist()


def test_a_picture_that_changes_after_indexing_is_not_stretched_to_its_former_shape(
    made: Recipe, picture: Picture, tmp_path: Path
) -> None:
    index = build_index(made)
    items = index.lengths.items["vision"]
    grid = int(items.rows[0]), int(items.cols[0])
    medium = FileMedia(str(tmp_path / "a.png"))
    reader = ITEM_READERS["vision"](made.model.all_encoders["vision"], made.data)
    assert len(reader.load_cells("image", medium, 0, 1, grid)) == grid[0] * grid[1]
    picture("a.png", 48, 16)
    other = ITEM_READERS["vision"](made.model.all_encoders["vision"], made.data)
    with pytest.raises(BadMediaError, match="changed since lengths were read; start again"):
        other.load_cells("image", medium, 0, 1, grid)


BUILDER = """
import sys
from mmtrain.data import build_index
from mmtrain.data.index import data_index as index
from mmtrain.data.index import index_cache, shared_arrays
from mmtrain.recipe.settings.schema import Recipe
index_cache.MIN_SOURCE_BYTES = 1
measure_samples = index.measure_samples
index.measure_samples = lambda *args: (print("reads"), measure_samples(*args))[1]
print(build_index(Recipe.model_validate_json(sys.argv[1])).fingerprint)
"""


def test_one_of_several_processes_reads_the_sources(made: Recipe) -> None:
    command = [sys.executable, "-c", BUILDER, made.model_dump_json()]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(words.count("reads") for words in outputs) == 1
    assert len({words[-1] for words in outputs}) == 1
