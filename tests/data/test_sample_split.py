"""Samples held out by `data.validation_fraction`, and sources of which only the first samples are read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mmtrain.data import build_index
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import Sample, Turn
from mmtrain.data.formats.sample_split import SampleSplit, sample_position
from mmtrain.data.index import index_cache
from mmtrain.data.index.data_check import check_sources_for_recipe
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.errors import DataError
from mmtrain.recipe.settings.base import select_for_saving
from mmtrain.recipe.settings.data_settings import LimitSettings, SourceSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.archives import png
from tests.data.rows import Row, row

NUM_SAMPLES = 2000


def rows_of_text() -> list[Row]:
    return [row(f"question {i}", f"answer {i}", name=f"id-{i}") for i in range(NUM_SAMPLES)]


def ids(recipe: Recipe, which: Any = "train") -> list[str]:
    return [sample.id for sample in build_index(recipe, which).samples]


def test_every_sample_trains_or_is_held_out(recipe: Callable[..., Recipe]) -> None:
    split = recipe(rows_of_text(), validation_fraction=0.1)
    train, held_out = ids(split), ids(split, "validation")
    assert sorted(train + held_out) == sorted(f"id-{i}" for i in range(NUM_SAMPLES))
    deviation = (NUM_SAMPLES * 0.1 * 0.9) ** 0.5
    assert abs(len(held_out) - NUM_SAMPLES * 0.1) < 4 * deviation
    assert f"holds out {len(held_out)} of 2,000 samples, on which nothing" in " ".join(build_index(split).warnings)
    larger = recipe(rows_of_text(), validation_fraction=0.2)
    assert set(held_out) < set(ids(larger, "validation")), "what was held out never trains with a larger fraction"


def test_the_order_of_samples_their_ids_and_more_of_them_change_nothing(recipe: Callable[..., Recipe]) -> None:
    split = recipe(rows_of_text(), validation_fraction=0.1)
    texts = {sample.answer for sample in build_index(split, "validation").samples}
    others = [row(f"other {i}", "yes") for i in range(5)] + [entry | {"id": "x"} for entry in rows_of_text()[::-1]]
    found = build_index(recipe(others, validation_fraction=0.1), "validation").samples
    assert {sample.answer for sample in found} - {"yes"} == texts


def test_positions_are_those_of_every_machine() -> None:
    """Written down once: another value here would train on what running trainings hold out."""
    turns = (Turn("user", "<image>What?"), Turn("assistant", "red"))
    sample = Sample("a", "/data/set/x.json", 3, turns, (FileMedia("/data/set/pictures/a.png"),))
    moved = Sample("b", "/mnt/x.json", 7, turns, (FileMedia("/mnt/pictures/a.png"),))
    source = SourceSettings(path=Path("/data/set/x.json"))
    assert sample_position(sample, source) == 0.3246823910564816
    assert sample_position(moved, SourceSettings(path=Path("/mnt/x.json"))) == sample_position(sample, source)
    named = SourceSettings(path=Path("/mnt/x.json"), image_root=Path("/mnt/pictures"))
    assert sample_position(moved, named) != sample_position(sample, source), "its medium has another name there"


def test_the_same_samples_are_held_out_in_another_folder(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    entries = [row(f"<image>question {i}", "red", f"{i % 7}.png") for i in range(60)]
    for i in range(7):
        (tmp_path / f"{i}.png").write_bytes(png())
    here = recipe(entries, validation_fraction=0.3)
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in [*tmp_path.glob("*.png"), tmp_path / "train.json"]:
        shutil.copy(file, moved)
    data = here.data.model_copy(update={"sources": (SourceSettings(path=moved / "train.json"),)})
    there = here.model_copy(update={"data": data})
    assert 0 < len(ids(here, "validation")) < 60
    for which in ("train", "validation"):
        assert build_index(here, which).fingerprint == build_index(there, which).fingerprint  # type: ignore[arg-type]


def test_a_sample_of_two_sources_is_in_one_part(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([row(f"<image>{i}", f"a circle {i}", "a.png") for i in range(100)]))
    (tmp_path / "a.png").write_bytes(png())
    texts: dict[str, set[str]] = {}
    for part in ("train", "validation"):
        sources = [SourceSettings(path=path), SourceSettings(path=path, captions="draw")]
        found = [read_samples(source, LimitSettings(), SampleSplit(0.5, part)) for source in sources]  # type: ignore[arg-type]
        described = {sample.answer for sample in found[0] if isinstance(sample, Sample)}
        drawn = {sample.turns[0].text for sample in found[1] if isinstance(sample, Sample)}
        assert described == drawn
        texts[part] = described
    assert not texts["train"] & texts["validation"]
    assert len(texts["train"] | texts["validation"]) == 100


def test_the_fraction_is_part_of_what_plans_caches_and_runs_depend_on(
    tmp_path: Path, recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 0)
    without = recipe(rows_of_text(), index_cache=tmp_path / "cache")
    split = recipe(rows_of_text(), index_cache=tmp_path / "cache", validation_fraction=0.1)
    expected = ids(split), ids(split, "validation")
    assert len(ids(without)) == NUM_SAMPLES
    for _ in range(2):  # from the cache
        assert (ids(split), ids(split, "validation")) == expected
        assert build_index(split, "validation").cache_folder is not None
    assert build_index(split).fingerprint != build_index(without).fingerprint
    for effect in ("plan", "lengths", "steps", "resume"):
        assert select_for_saving(split, effect)["data"]["validation_fraction"] == 0.1
        assert "validation_fraction" not in select_for_saving(without, effect)["data"], "saved runs stay valid"


def test_checking_data_reads_both_parts(recipe: Callable[..., Recipe]) -> None:
    split = recipe([*rows_of_text()[:50], {"id": "bad"}], validation_fraction=0.5)
    report = check_sources_for_recipe(split, split.data.sources)
    assert (report.samples, report.kinds) == (51, {"malformed": 1})
    assert len(build_index(split).quarantined) == 1
    assert build_index(split, "validation").quarantined == (), "it is counted once"


def test_a_fraction_that_holds_out_nothing_is_told(recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(DataError, match=r"^data\.validation_fraction: 1e-09 holds out too little, raise it: no usable"):
        build_index(recipe(rows_of_text()[:3], validation_fraction=1e-9), "validation")


@pytest.mark.parametrize("count", [1, 5, 100])
def test_max_samples_reads_the_first_ones(tmp_path: Path, recipe: Callable[..., Recipe], count: int) -> None:
    entries = [*rows_of_text()[:3], {"id": "bad"}, *rows_of_text()[4:10]]
    source = {"path": tmp_path / "train.json", "max_samples": count}
    index = build_index(recipe(entries, sources=[source]))
    assert [sample.index for sample in index.samples] == [i for i in range(min(count, 10)) if i != 3]
    assert len(index.quarantined) == (count > 3)
    both = recipe(entries, sources=[source], validation_fraction=0.5)
    if count > 1:
        assert len(ids(both)) + len(ids(both, "validation")) == len(index.samples)
