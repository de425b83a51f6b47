"""A split of a data set on the hub is the files that its card, or their names, say."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mmtrain.cli import main
from mmtrain.data import build_index
from mmtrain.data.formats.read_source import list_shards, read_samples
from mmtrain.data.formats.sample import Sample
from mmtrain.data.remote.locations import remote_store
from mmtrain.errors import DataError, RemoteReadError
from mmtrain.recipe import dump_recipe, load_recipe
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.cli.conftest import DEMO
from tests.data.archives import parquet, png
from tests.data.file_server import FileServer
from tests.data.rows import row
from tests.data.test_remote_sources import hub_folder, server

__all__ = ["hub_folder", "server"]  # fixtures

HUB = "hf://datasets/team/set"
CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: parts/a-*.jsonl
  - split: heldout
    path: [parts/b.jsonl, parts/c.jsonl]
- config_name: other
  data_files: other/*.jsonl
---
# A data set
"""


def _write(folder: Path, name: str, *answers: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row("what?", answer)) + "\n" for answer in answers), encoding="utf-8")


def _answers(path: str) -> list[str]:
    samples = read_samples(SourceSettings(path=path), LimitSettings())
    return [sample.answer for sample in samples if isinstance(sample, Sample)]


def _names(split: str) -> list[str]:
    files = list_shards(SourceSettings(path=f"{HUB}?split={split}").path)
    return [str(file).removeprefix(f"{HUB}/") for file in files]


def test_the_card_names_the_files(hub_folder: Path) -> None:
    (hub_folder / "README.md").write_text(CARD, encoding="utf-8")
    for name in ("a-0", "a-1", "b", "c", "train"):  # the last one is in no split of the card
        _write(hub_folder, f"parts/{name}.jsonl", name)
    _write(hub_folder, "other/x.jsonl", "x")
    assert _answers(f"{HUB}?split=train") == ["a-0", "a-1"]
    assert _answers(f"{HUB}?split=heldout") == ["b", "c"]
    assert _answers(f"{HUB}@v1.0?split=heldout") == ["b", "c"]


def test_without_a_card_files_are_named_like_their_split(hub_folder: Path) -> None:
    names = ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "dev.jsonl", "test/a.jsonl"]
    for name in (*names, "data/constrained.jsonl", "notes.txt"):
        _write(hub_folder, name, name)
    assert _names("train") == names[:2]
    assert _names("validation") == ["dev.jsonl"]
    assert _names("test") == ["test/a.jsonl"]
    assert _names("constrained") == ["data/constrained.jsonl"]


def test_files_without_the_name_of_a_split_are_train(hub_folder: Path) -> None:
    (hub_folder / "README.md").write_text("# No metadata", encoding="utf-8")
    _write(hub_folder, "rows.jsonl", "1", "2")
    assert _answers(f"{HUB}?split=train") == ["1", "2"]


def test_a_split_of_parquet_files_is_indexed_as_the_folder_is(hub_folder: Path, recipe: Callable[..., Recipe]) -> None:
    (hub_folder / "data").mkdir()
    for number in range(2):
        images = [png(width=8 + 8 * n + 16 * number) for n in range(5)]
        parquet(hub_folder / "data" / f"train-{number}.parquet", {"caption": ["x"] * 5, "image": images})
    there = build_index(recipe([], sources=[{"path": f"{HUB}?split=train"}]))
    here = build_index(recipe([], sources=[{"path": hub_folder / "data" / "train-*.parquet"}]))
    assert there.content_sha256 == here.content_sha256
    assert len(there.lengths.tokens) == 10


def test_a_recipe_and_the_command_line_name_a_split(
    hub_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe that a run saves reads the same split again, as its ranks and a resumed run do."""
    _write(hub_folder, "data/train-0.jsonl", "1", "2")
    override = f"data.sources.0.path={HUB}?split=train"
    loaded = load_recipe(DEMO, [override, "data.tokenizer=t.json"])
    saved = tmp_path / "recipe.yaml"
    saved.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    [source] = load_recipe(saved).recipe.data.sources
    assert [str(file) for file in list_shards(source.path)] == [f"{HUB}/data/train-0.jsonl"]
    monkeypatch.setattr(sys, "argv", ["mmtrain", "data", "check", f"{HUB}?split=train"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out.startswith("2 samples, 0 of them bad")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{HUB}?split=tran", r"set\?split=tran: found split tran, allowed: train"),
        ("hf://datasets/team/none?split=train", "team/none: the hub has no such data set with files.*HF_TOKEN"),
    ],
)
def test_what_the_hub_does_not_have_is_said(hub_folder: Path, path: str, message: str) -> None:
    _write(hub_folder, "train.jsonl", "1")
    with pytest.raises(DataError, match=message):
        _answers(path)


def test_a_card_of_several_configurations_without_a_default_is_refused(hub_folder: Path) -> None:
    (hub_folder / "README.md").write_text(CARD.replace("config_name: default", "config_name: first"), encoding="utf-8")
    _write(hub_folder, "parts/a-0.jsonl", "1")
    with pytest.raises(DataError, match="configurations first, other, and none is the default"):
        _answers(f"{HUB}?split=train")


def test_a_hub_that_answers_nothing_is_named(server: FileServer, hub_folder: Path) -> None:
    _write(hub_folder, "train.jsonl", "1")
    server.faults = [503] * 1000
    with pytest.raises(RemoteReadError, match=r"team/set: cannot be reached after 6 attempts: status 503"):
        _answers(f"{HUB}?split=train")
    remote_store.cache_clear()
    server.faults = []
    server.token = "another"
    with pytest.raises(RemoteReadError, match=r"denied.*credentials come from the environment"):
        _answers(f"{HUB}?split=train")


@pytest.mark.parametrize("url", [f"{HUB}?token=x", f"{HUB}?split=a&token=x", f"{HUB}/data?split=train"])
def test_nothing_else_is_asked_of_the_hub(url: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: a split of a data set, as hf://datasets/org/name\?split=train"):
        SourceSettings(path=url)
