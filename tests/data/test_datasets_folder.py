"""Folders that the `datasets` library saves: the same samples as from Parquet, and nothing lost without a word."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from mmtrain.data import Quarantined, Sample
from mmtrain.data.formats.read_source import read_samples
from mmtrain.errors import DataError
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from tests.data.archives import parquet

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TURNS = pa.struct([("role", pa.list_(pa.string())), ("content", pa.list_(pa.string()))])


def _columns() -> dict[str, Any]:
    """Return the columns of five samples, with a `Sequence` of turns and a list of images."""
    images = [[b"a", b"bb"], [], None, [b"ccc"], [b"dddd"]]
    structs = [None if row is None else [{"bytes": image, "path": "x.png"} for image in row] for row in images]
    talk = {"role": ["user", "assistant"], "content": ["hi", "yes"]}
    return {
        "messages": pa.array([talk] * 5, TURNS),
        "images": pa.array(structs, pa.list_(IMAGE)),
        "jpg": pa.array([{"bytes": bytes([i]) * 9, "path": None} for i in range(5)], IMAGE),
        "label": pa.array(range(5)),
        "id": pa.array(list("pqrst")),
    }


def _save(folder: Path, columns: dict[str, Any], num_files: int = 1, **options: Any) -> Path:
    """Save columns as `Dataset.save_to_disk` does, with record batches of two rows."""
    folder.mkdir(parents=True)
    table = pa.table(columns)
    names = [f"data-{i:05d}-of-{num_files:05d}.arrow" for i in range(num_files)]
    for i, name in enumerate(names):
        first, end = (number * len(table) // num_files for number in (i, i + 1))
        written = pa.ipc.IpcWriteOptions(**options)
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, table.schema, options=written) as writer,
        ):
            writer.write_table(table.slice(first, end - first), max_chunksize=2)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def _read(path: Path, **limits: Any) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path), LimitSettings(**limits)))


def _content(sample: Sample | Quarantined) -> tuple[Any, ...]:
    """Return what is in a sample, with the bytes of its media."""
    assert isinstance(sample, Sample), sample
    images = []
    for image in sample.images:
        with image.open() as file:
            images.append(file.read())
    return sample.id, sample.turns, images


@pytest.mark.parametrize("num_files", [1, 2])
def test_a_saved_data_set_has_the_samples_of_parquet(tmp_path: Path, num_files: int) -> None:
    columns = _columns()
    expected = [_content(sample) for sample in _read(parquet(tmp_path / "x.parquet", columns))]
    folder = _save(tmp_path / "saved", columns, num_files)
    assert [_content(sample) for sample in _read(folder)] == expected
    assert expected[0][2] == [b"a", b"bb", b"\x00" * 9]
    single = [_content(sample) for file in sorted(folder.glob("*.arrow")) for sample in _read(file)]
    assert single == expected, "files can be named too"


def test_the_format_with_a_footer_is_read_too(tmp_path: Path) -> None:
    table = pa.table({"caption": ["one", "two", "three"], "image": [b"1", b"22", b"333"]})
    path = tmp_path / "x.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert [_content(sample)[2] for sample in _read(path)] == [[b"1"], [b"22"], [b"333"]]


def test_limits_hold(tmp_path: Path) -> None:
    samples = _read(_save(tmp_path / "saved", _columns()), max_member_bytes=8)
    assert {sample.kind for sample in samples if isinstance(sample, Quarantined)} == {"parquet_cell_size"}
    few = _read(tmp_path / "saved", max_members=3)
    assert isinstance(few[-1], Quarantined)
    assert few[-1].kind == "parquet_too_many"


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    """Also one that ends with a whole record batch, which Arrow itself would take for the end."""
    folder = _save(tmp_path / "saved", _columns())
    (file,) = folder.glob("*.arrow")
    content = file.read_bytes()
    for num_bytes in (8, 300, len(content) - 10):
        file.write_bytes(content[:-num_bytes])
        with pytest.raises(DataError, match="the file is truncated or damaged"):
            _read(folder)


def test_compressed_batches_are_refused(tmp_path: Path) -> None:
    columns = {"caption": ["a" * 100_000] * 4, "image": [b"1"] * 4}
    folder = _save(tmp_path / "saved", columns, compression="zstd")
    with pytest.raises(DataError, match="write them without compression, or as Parquet"):
        _read(folder)


def test_folders_that_are_no_single_data_set_say_what_to_name(tmp_path: Path) -> None:
    folder = _save(tmp_path / "all" / "train", _columns()).parent
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="several splits: allowed as `split` of the source: train, test"):
        _read(folder)
    chosen = SourceSettings(path=folder, split="train")
    assert len(list(read_samples(chosen, LimitSettings()))) == 5
    with pytest.raises(DataError, match=r"found \.\., allowed"):
        list(read_samples(SourceSettings(path=folder, split=".."), LimitSettings()))
    state = folder / "train" / "state.json"
    for text, problem in (
        ('{"_data_files": [{"filename": "../../secret.arrow"}]}', "must be a list of files in this folder"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', "gone.arrow is missing, which state.json names"),
        ('{"_data_files": [{"filename": "x"}], "_indices_data_files": [{"filename": "y"}]}', "flatten_indices"),
        ("[]", "expected an object"),
        ("{", "cannot be read"),
    ):
        state.write_text(text)
        with pytest.raises(DataError, match=problem):
            _read(folder / "train")
