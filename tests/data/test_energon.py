"""Energon data sets: shards of a split, samples by their field map, and clear errors for what cannot be followed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmtrain.data import Quarantined, Sample
from mmtrain.data.formats.energon import description_files
from mmtrain.data.formats.read_source import read_samples
from mmtrain.errors import DataError
from mmtrain.recipe.data_settings import LimitSettings, SourceSettings
from tests.data.archives import png, tar

CAPTIONS = {"sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"}}
QUESTIONS = {
    "__module__": "megatron.energon",
    "__class__": "VQAWebdataset",
    "field_map": {"image": "jpg,png", "context": "json[question]", "answers": "json[answers]"},
}


def _dataset(folder: Path, description: dict[str, Any], shards: dict[str, dict[str, bytes]], **split: Any) -> Path:
    meta = folder / ".nv-meta"
    meta.mkdir(parents=True)
    for name, members in shards.items():
        tar(folder / name, members)
    parts = {"split_parts": {"train": list(shards), "val": [], "test": []}, "exclude": []}
    (meta / "split.yaml").write_text(yaml.safe_dump(parts | split))
    (meta / "dataset.yaml").write_text(yaml.safe_dump(description))
    (meta / ".info.yaml").write_text("shard_counts: {}")
    return folder


def _read(path: Path, split: str | None = None) -> list[Sample | Quarantined]:
    return list(read_samples(SourceSettings(path=path, split=split), LimitSettings()))


def _turns(sample: Sample | Quarantined) -> list[tuple[str, str]]:
    assert isinstance(sample, Sample), sample
    return [(turn.role, turn.text) for turn in sample.turns]


def test_questions_follow_the_field_map(tmp_path: Path) -> None:
    members = {
        "1.jpg": png(),
        "1.json": json.dumps({"question": "What?", "answers": ["red", "a red one"]}).encode(),
        "2.png": png(),
        "2.json": json.dumps({"question": "Where is <image>?", "answers": "here"}).encode(),
        "3.png": png(),
        "3.json": json.dumps({"question": "Why?"}).encode(),
        "4.json": json.dumps({"question": "Who?", "answers": "me"}).encode(),
    }
    first, second, third, fourth = _read(_dataset(tmp_path / "set", QUESTIONS, {"0.tar": members}))
    assert _turns(first) == [("user", "<image>\nWhat?"), ("assistant", "red")]
    assert _turns(second) == [("user", "Where is <image>?"), ("assistant", "here")]
    assert isinstance(second, Sample)
    with second.images[0].open() as file:
        assert file.read() == members["2.png"]
    assert isinstance(third, Quarantined)
    assert "`answers` (json[answers]) cannot be read: KeyError" in third.reason
    assert isinstance(fourth, Quarantined)
    assert "no member for `image` (jpg, png)" in fourth.reason


def test_captions_come_from_the_named_member(tmp_path: Path) -> None:
    members = {"1.png": png(), "1.txt": b"no", "1.caption": b" a red square\n"}
    description = CAPTIONS | {"field_map": {"image": "png", "caption": "caption"}}
    (sample,) = _read(_dataset(tmp_path / "set", description, {"0.tar": members}))
    assert _turns(sample) == [("user", "<image>"), ("assistant", "a red square")]


def test_splits_name_shards_and_leave_samples_out(tmp_path: Path) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    shards = {
        f"shard_{i:02d}.tar": {f"{i}{j}.json": json.dumps(talk | {"id": f"{i}{j}"}).encode() for j in range(2)}
        for i in range(5)
    }
    parts = {"train": ["shard_{00..02}.tar"], "val": ["shard_03.tar"]}
    exclude = ["shard_01.tar", "shard_02.tar/20", "other/shard_02.tar/21"]
    folder = _dataset(tmp_path / "set", {"__class__": "CrudeWebdataset"}, shards, split_parts=parts, exclude=exclude)
    assert [sample.id for sample in _read(folder)] == ["00", "01", "21"]
    assert [sample.id for sample in _read(folder, "val")] == ["30", "31"]
    assert [file.name for file in description_files(folder)] == ["split.yaml", "dataset.yaml"]
    with pytest.raises(DataError, match=r"no shards of split test; it has train, val: set the source's `split`"):
        _read(folder, "test")


@pytest.mark.parametrize(
    ("description", "split", "problem"),
    [
        ({"__class__": "OCRWebdataset"}, {}, "samples of OCRWebdataset are not read; allowed: Captioning"),
        (CAPTIONS | {"sample_loader": "sample_loader.py:load"}, {}, "is code, which is not run"),
        (CAPTIONS | {"field_map": {"image": "jpg"}}, {}, "field_map.caption: found nothing, allowed: an extension"),
        ({"__class__": "CrudeWebdataset"}, {"split_parts": {"train": ["../x.tar"]}}, "is not in the data set's folder"),
        ({"__class__": "CrudeWebdataset"}, {"split_parts": []}, "no shards of split train; it has none"),
        ({"__class__": "CrudeWebdataset"}, {"split_parts": {"train": ["gone.tar"]}}, "gone.tar: no such shard"),
    ],
)
def test_what_cannot_be_followed_is_an_error(
    tmp_path: Path, description: dict[str, Any], split: dict[str, Any], problem: str
) -> None:
    folder = _dataset(tmp_path / "set", description, {"0.tar": {"1.txt": b"x"}}, **split)
    with pytest.raises(DataError, match=problem):
        _read(folder)


def test_damaged_descriptions_are_named(tmp_path: Path) -> None:
    folder = _dataset(tmp_path / "set", {"__class__": "CrudeWebdataset"}, {"0.tar": {"1.txt": b"x"}})
    for text, problem in (("a: [", "cannot be read"), ("- 1", "expected a mapping"), (None, "energon prepare")):
        path = folder / ".nv-meta" / "dataset.yaml"
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(DataError, match=problem):
            _read(folder)


def test_a_split_of_other_data_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has split val, but is no folder of Energon"):
        _read(tar(tmp_path / "x.tar", {"1.txt": b"x"}), "val")
