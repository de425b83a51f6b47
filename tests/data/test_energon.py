"""Energon data sets: shards of a split, samples by their field map, and clear errors for what cannot be followed."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmtrain.api.recipe_index import read_named_sources
from mmtrain.data import Quarantined, Sample, build_index
from mmtrain.data.formats.energon import description_files
from mmtrain.data.formats.read_source import read_samples
from mmtrain.errors import DataError, RecipeError
from mmtrain.recipe import load_recipe
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
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


def _blend(path: Path, entry: dict[str, Any], version: str = "MetadatasetV2", **splits: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"__module__": "megatron.energon", "__class__": version, "splits": {"train": entry, **splits}}
    path.write_text(yaml.safe_dump(described))
    return path


def _load(folder: Path, *settings: str) -> Recipe:
    recipe = folder / "recipe.yaml"
    unit = "{layers: 1, hidden: 8, heads: 1, ffn: 8, "
    recipe.write_text(
        f"name: t\nmodel:\n  vision: {unit}patch: 8, max_side: 8}}\n  llm: {unit}vocab: 512}}\n"
        "data: {sources: [{path: blend.yaml}], tokenizer: t.json, seq_len: 64, "
        "image: {min_pixels: 64, max_pixels: 1024}}\n"
        "train: {steps: 1, global_batch: 2, optimizer: {lr: 1.0e-3}}\n"
    )
    return load_recipe(recipe, settings, {}).recipe


def test_weights_of_a_metadataset_become_shares_of_samples(tmp_path: Path) -> None:
    _blend(
        tmp_path / "more" / "inner.yaml",
        {"datasets": [{"weight": 1, "path": "c"}, {"weight": 3, "path": "../d"}]},
        "Metadataset",
    )
    entries = [
        {"weight": 5, "path": "./a", "subflavors": {"tag": "x"}},
        {"weight": 2, "path": "./a", "split_part": "val"},
        {"weight": 3, "path": "more/inner.yaml"},
    ]
    _blend(tmp_path / "blend.yaml", {"blend": entries}, val={"path": "./a"})
    recipe = _load(tmp_path, f"data.validation=[{{path: {tmp_path}/blend.yaml}}]")
    found = [(s.path, s.split, s.share and round(s.share[0], 6)) for s in recipe.data.sources]
    assert found == [
        (tmp_path / "a", "train", 0.5),
        (tmp_path / "a", "val", 0.2),
        (tmp_path / "more" / "c", "train", 0.075),
        (tmp_path / "d", "train", 0.225),
    ]
    assert recipe.data.share_unit == "samples"
    assert [(s.path, s.split, s.share) for s in recipe.data.validation] == [(tmp_path / "a", "val", None)]

    other = f"data.sources.1={{path: {tmp_path}/x.json, share: {{0: 0.2, 9: 0.6}}}}"
    recipe = _load(tmp_path, "data.sources.0.share={0: 0.8, 9: 0.4}", other)
    assert [round(s.share[9], 6) for s in recipe.data.sources if s.share] == [0.2, 0.08, 0.03, 0.09, 0.6]


def test_repetitions_of_a_metadataset_become_weights(tmp_path: Path) -> None:
    inner = {"repetitions": 2, "blend_epochized": [{"repetitions": 3, "path": "b"}, {"path": "c"}]}
    _blend(tmp_path / "blend.yaml", {"blend_epochized": [{"repetitions": 0.5, "path": "a"}, inner]})
    recipe = _load(tmp_path)
    assert [(s.path.name, s.weight, s.share) for s in recipe.data.sources] == [
        ("a", 0.5, None),
        ("b", 6, None),
        ("c", 2, None),
    ]
    assert recipe.data.share_unit == "tokens"


def test_a_metadataset_is_read_like_its_data_sets(tmp_path: Path, tokenizer_path: Path) -> None:
    for name, count in (("a", 3), ("b", 6)):
        members = {
            f"{i}.{end}": png() if end == "png" else b"a red square" for i in range(count) for end in ("png", "txt")
        }
        _dataset(tmp_path / name, CAPTIONS | {"field_map": {"image": "png", "caption": "txt"}}, {"0.tar": members})
    _blend(tmp_path / "blend.yaml", {"blend": [{"weight": 3, "path": "a"}, {"weight": 1, "path": "b"}]})
    loaded = _load(tmp_path, f"data.tokenizer={tokenizer_path}")
    index = build_index(loaded)
    assert index.mixture is not None
    assert index.sources is not None
    assert index.sources.names == ("a", "b")
    assert index.sources.numbers.tolist() == [0] * 3 + [1] * 6
    assert [len(_read(source.path, source.split)) for source in read_named_sources([str(tmp_path / "blend.yaml")])] == [
        3,
        6,
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"join": {"a": {"path": "a"}}}, r"splits\.train\.join cannot be followed"),
        ({"blend": [{"path": "a", "aux": {"b": "b"}}]}, r"splits\.train\.blend\.0\.aux cannot be followed"),
        ({"blend": [{"path": "s3://bucket/a"}]}, "found 's3://bucket/a', allowed: a folder or a metadataset"),
        ({"blend": [{"weight": -1, "path": "a"}]}, r"blend\.0\.weight: found -1, allowed: a number above 0"),
        ({"blend": []}, r"blend: found \[\], expected a list"),
        ({"path": "blend.yaml"}, "perhaps in a circle"),
        ({"path": "gone.yaml"}, r"gone\.yaml: no such file"),
        (["a"], "found list, expected `path`"),
        (
            {"blend": [{"blend_epochized": [{"path": "a", "repetitions": 2}]}]},
            "weights and repetitions inside of each other",
        ),
    ],
)
def test_what_a_metadataset_cannot_say_is_an_error(tmp_path: Path, entry: Any, message: str) -> None:
    _blend(tmp_path / "blend.yaml", entry)
    with pytest.raises(RecipeError, match=message):
        _load(tmp_path)


def test_metadatasets_of_other_splits_and_units_are_errors(tmp_path: Path) -> None:
    _blend(tmp_path / "blend.yaml", {"blend": [{"path": "a"}, {"path": "b"}]})
    with pytest.raises(RecipeError, match="no split test; it has train: set the source's `split`"):
        _load(tmp_path, "data.sources.0.split=test")
    with pytest.raises(RecipeError, match="share_unit: found tokens, but weights of a metadataset"):
        _load(tmp_path, "data.share_unit=tokens")
    (tmp_path / "blend.yaml").write_text("name: another recipe")
    with pytest.raises(
        RecipeError, match="found no `__class__`, allowed as a source in YAML: Metadataset, MetadatasetV2"
    ):
        _load(tmp_path)
