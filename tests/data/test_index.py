import base64
import json
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mmtrain.data import build_index
from mmtrain.data.index import data_index, media_versions
from mmtrain.data.index import sample_lengths as measure
from mmtrain.data.media import item_readers
from mmtrain.data.media.images import load_rgb_images
from mmtrain.data.text.token_counter import TokenCounter
from mmtrain.errors import DataError, TooManyBadSamples
from mmtrain.recipe.settings.data_settings import ImageSettings
from mmtrain.recipe.settings.schema import Recipe
from tests.data.rows import row

Picture = Callable[..., Path]
MakeRecipe = Callable[..., Recipe]


def test_lengths_follow_from_headers_and_text(picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png", 16, 24)
    picture("b.png", 8, 8)
    rows = [row("<image>x<image>", "red", "a.png", "b.png", name="two"), row("1 + 2", "3", name="none")]
    made = recipe(rows)
    index = build_index(made)

    assert [s.id for s in index.samples] == ["two", "none"]
    items = index.lengths.items["vision"]
    assert items.first.tolist() == [0, 2, 2]
    assert (items.rows.tolist(), items.cols.tolist()) == ([3, 1], [2, 1])
    assert items.tokens.tolist() == items.features.tolist() == [6, 1]
    assert (index.unit_features(0, "vision"), index.unit_features(1, "vision")) == ([6, 1], [])
    assert index.lengths.tokens[0] == 4 + 7 + 1 + 1  # each turn's start and end, image tokens, `x`, `red`
    assert index.lengths.targets.tolist() == [2, 2]  # the answer's token and <|end|>
    assert index.quarantined == ()


def test_images_inside_of_the_data_are_measured_and_found_again(picture: Picture, recipe: MakeRecipe) -> None:
    written = base64.b64encode(picture("a.png", 16, 24).read_bytes()).decode()
    rows = [row("<image>x", "red", "a.png"), row("<image>x", "red", f"data:image/png;base64,{written}")]
    index = build_index(recipe(rows))
    items = index.lengths.items["vision"]
    assert (items.rows.tolist(), items.cols.tolist()) == ([3, 3], [2, 2])
    assert index.lengths.tokens[0] == index.lengths.tokens[1]
    decoded = [load_rgb_images(sample.images[0], [(16, 24)], ImageSettings())[0] for sample in index.samples]
    assert decoded[0].tobytes() == decoded[1].tobytes()
    assert written not in index.samples[1].images[0].name


def test_class_tokens_and_merging_change_the_counts(picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png", 32, 16)
    plain = recipe([row("<image>", "red", "a.png")])
    vision = plain.model.vision
    assert vision is not None
    merged = vision.model_copy(update={"downsample": "pixel_shuffle", "merge": 2, "class_token": True})
    index = build_index(plain.model_copy(update={"model": plain.model.model_copy(update={"vision": merged})}))
    items = index.lengths.items["vision"]
    assert (items.rows[0], items.cols[0], items.tokens[0], items.features[0]) == (2, 4, 9, 2)
    assert build_index(plain).lengths.tokens[0] - index.lengths.tokens[0] == 8 - 2


def test_a_resampler_makes_as_many_features_of_images_of_any_size(picture: Picture, recipe: MakeRecipe) -> None:
    picture("small.png", 16, 16)
    picture("large.png", 32, 16)
    plain = recipe([row("<image>", "red", "small.png"), row("<image>", "red", "large.png")])
    changed = plain.model_dump()
    changed["model"]["vision"]["projector"] |= {"kind": "resampler", "queries": 3}
    lengths = build_index(Recipe.model_validate(changed)).lengths
    assert lengths.items["vision"].tokens.tolist() == [4, 8]
    assert lengths.items["vision"].features.tolist() == [3, 3]
    assert (np.asarray(build_index(plain).lengths.tokens) - np.asarray(lengths.tokens)).tolist() == [4 - 3, 8 - 3]


def test_every_kind_of_unusable_sample_is_quarantined(tmp_path: Path, picture: Picture, recipe: MakeRecipe) -> None:
    picture("good.png")
    picture("large.png", 100, 100)
    content = picture("whole.jpg", 64, 64).read_bytes()
    (tmp_path / "cut.jpg").write_bytes(content[:-10])
    (tmp_path / "text.png").write_text("no picture")
    rows = {
        "missing_image": row("<image>?", "a", "gone.png"),
        "not_an_image": row("<image>?", "a", "text.png"),
        "truncated": row("<image>?", "a", "cut.jpg"),
        "image_count": row("<image><image>?", "a", "good.png"),
        "too_long": row("word " * 100, "a"),
        "too_many_images": row("<image>" * 4, "a", *["good.png"] * 4),
        "no_answer": row("hm?", " "),
        "too_many_pixels": row("<image>", "a", "large.png"),
        "image_path": row("<image>", "a", "../a.png"),
        "malformed": {"id": "x"},
        "usable": row("<image>", "a", "good.png"),
    }
    for name, entry in rows.items():
        entry["id"] = name
    index = build_index(
        recipe(
            list(rows.values()), max_images=3, image={"min_pixels": 64, "max_pixels": 1024, "max_source_pixels": 5000}
        )
    )
    assert {q.id: q.kind for q in index.quarantined} == {name: name for name in rows if name != "usable"}
    assert [s.id for s in index.samples] == ["usable"]
    by_id = {q.id: q for q in index.quarantined}
    assert all(list(rows)[q.index] == q.id for q in index.quarantined)
    assert "gone.png" in by_id["missing_image"].reason
    assert "1 images, but 2 <image> marks" in by_id["image_count"].reason
    assert "data.seq_len = 64" in by_id["too_long"].reason


@pytest.mark.usefixtures("in_one_process")
def test_huge_texts_are_rejected_without_tokenizing_them(recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    count = TokenCounter.__call__

    def watched(self: TokenCounter, text: str) -> int:
        counted.append(text)
        return count(self, text)

    monkeypatch.setattr(TokenCounter, "__call__", watched)
    index = build_index(recipe([row("é" * 10_000, "a"), row("word " * 20, "a"), row("q", "a")]))
    assert [q.kind for q in index.quarantined] == ["too_long"] * 2
    assert re.search(r"at least \d{3,} LLM tokens, data\.seq_len = 64", index.quarantined[0].reason)
    assert "least" not in index.quarantined[1].reason
    assert max(map(len, counted)) <= 100


def test_a_text_only_model_quarantines_samples_with_images(picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png")
    made = recipe([row("<image>", "a", "a.png"), row("q", "a")])
    text_only = made.model_copy(update={"model": made.model.model_copy(update={"vision": None})})
    index = build_index(text_only)
    assert [q.kind for q in index.quarantined] == ["no_vision"]
    assert index.lengths.items == {}


def test_above_the_allowed_rate_the_run_stops_and_names_the_first_samples(recipe: MakeRecipe) -> None:
    rows = [row("<image>", "a", f"gone{i}.png", name=f"s{i}") for i in range(7)] + [row("q", "a")] * 93
    assert len(build_index(recipe(rows, max_bad_rate=0.07)).quarantined) == 7
    with pytest.raises(TooManyBadSamples) as caught:
        build_index(recipe(rows, max_bad_rate=0.069))
    message = str(caught.value)
    assert "7 of 100 samples are unusable (missing_image 7); data.max_bad_rate = 0.069 allows 6" in message
    assert "number 0, id 's0': missing_image" in message
    assert message.count("\n") == 5


def test_no_usable_sample_is_a_data_error(recipe: MakeRecipe) -> None:
    with pytest.raises(DataError, match=r"data\.sources: no usable samples in .*train\.json"):
        build_index(recipe([row("<image>", "a", "gone.png")]))
    with pytest.raises(DataError, match=r"data\.validation: no usable samples in an empty list"):
        build_index(recipe([row("q", "a")]), "validation")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"max_pixels": 63, "min_pixels": 1}, r"data\.image\.max_pixels is 63; .* 8 x 8 = 64"),
        ({"max_pixels": 100, "min_pixels": 101}, r"at least data\.image\.min_pixels = 101"),
        ({"scheme": "fixed", "size": 20}, r"data\.image\.size is 20; it must be a multiple"),
        ({"scheme": "fixed", "size": 72}, r"at most patch \* max_side = 64"),
    ],
)
def test_image_settings_that_fit_no_image_are_rejected(
    recipe: MakeRecipe, image: dict[str, object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        build_index(recipe([row("q", "a")], image=image))


def test_a_tokenizer_larger_than_the_vocabulary_is_rejected(recipe: MakeRecipe) -> None:
    made = recipe([row("q", "a")])
    llm = made.model.llm.model_copy(update={"vocab": 100})
    small = made.model_copy(update={"model": made.model.model_copy(update={"llm": llm})})
    with pytest.raises(DataError, match=r"model\.llm\.vocab is 100.*set model\.llm\.vocab to at least"):
        build_index(small)


def test_fingerprints_differ_for_different_data(tmp_path: Path, picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png", 16, 16)
    rows = [row("<image>", "a", "a.png"), row("q", "a")]
    first = build_index(recipe(rows)).fingerprint
    assert build_index(recipe(rows)).fingerprint == first
    picture("a.png", 24, 16)
    assert build_index(recipe(rows)).fingerprint != first
    picture("a.png", 16, 16)
    assert build_index(recipe([rows[0], row("q", "a", name="other")])).fingerprint != first
    other = build_index(recipe([rows[0], row("Q", "a")]))
    assert other.lengths.tokens.tolist() == build_index(recipe(rows)).lengths.tokens.tolist()
    assert other.fingerprint != first, "of the same length, but another text"
    doubled = recipe(rows, sources=[{"path": tmp_path / "train.json", "weight": 2}])
    assert build_index(doubled).fingerprint != first


def test_fingerprints_cover_the_parts_of_media(picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png")
    two = build_index(recipe([row("<image><image>", "a", "a.png", "a.png")]))
    frames = replace(two, item_parts={"vision": np.array([0, 1])})
    assert two.item_parts["vision"].tolist() == [0, 0]
    assert frames.fingerprint != two.fingerprint


def test_fingerprints_do_not_depend_on_the_folder(tmp_path: Path, picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png")
    original = build_index(recipe([row("<image>", "a", "a.png")]))
    (tmp_path / "pictures").mkdir()
    moved = tmp_path / "moved.json"
    (tmp_path / "train.json").rename(moved)
    (tmp_path / "a.png").rename(tmp_path / "pictures" / "a.png")
    sources = [{"path": moved, "image_root": tmp_path / "pictures"}]
    assert build_index(recipe([], sources=sources)).fingerprint == original.fingerprint


def test_sources_keep_their_weights(tmp_path: Path, picture: Picture, recipe: MakeRecipe) -> None:
    picture("a.png")
    (tmp_path / "more.jsonl").write_text(json.dumps(row("<image>", "b", "a.png")) + "\n")
    sources = [{"path": tmp_path / "train.json", "weight": 0.5}, {"path": tmp_path / "more.jsonl", "weight": 3}]
    index = build_index(recipe([row("q", "a"), row("<image>", "a", "a.png")], sources=sources))
    assert np.array_equal(index.weights, [0.5, 0.5, 3])


@pytest.mark.usefixtures("in_one_process")
def test_the_header_of_a_shared_image_is_read_once(
    picture: Picture, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture("a.png")
    read_media: list[object] = []
    read_items = item_readers.read_vision_items

    def counting(kind: Any, media: Any, *settings: Any) -> Any:
        read_media.append(media)
        return read_items(kind, media, *settings)

    monkeypatch.setattr(item_readers, "read_vision_items", counting)
    messages: list[str] = []
    monkeypatch.setattr("mmtrain.data.index.sample_lengths._NOTIFY_EVERY_SAMPLES", 2)
    index = build_index(recipe([row("<image>", "a", "a.png")] * 5), notify=messages.append)
    assert (len(index.samples), len(read_media)) == (5, 1)
    assert messages == [f"reading headers: {n} samples so far" for n in (2, 4)]


@pytest.mark.usefixtures("in_one_process")
def test_threads_read_headers_that_wait_for_the_disk(
    picture: Picture, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read headers that compute in the main thread and headers that wait in other threads; the index is the same."""
    for i in range(5):
        picture(f"{i}.png", 8 * (i + 1), 8)
    made = recipe([row("<image>", "a", f"{i}.png") for i in (0, 1, 2, 3, 4, 1, 9)])
    monkeypatch.setattr(measure, "_TASK_FILES", 2)
    readers: list[str] = []
    read_items = item_readers.read_vision_items

    def watched(kind: Any, media: Any, *settings: Any) -> Any:
        readers.append(threading.current_thread().name)
        return read_items(kind, media, *settings)

    monkeypatch.setattr(item_readers, "read_vision_items", watched)
    computing = SimpleNamespace(perf_counter=lambda: 0.0, thread_time=lambda: 0.0)
    monkeypatch.setattr(media_versions, "time", computing)
    read_by_main_thread = build_index(made)
    assert set(readers) == {threading.main_thread().name}
    readers.clear()
    waiting = SimpleNamespace(perf_counter=iter(range(1000)).__next__, thread_time=lambda: 0.0)
    monkeypatch.setattr(media_versions, "time", waiting)
    read_by_threads = build_index(made)
    assert readers.count(threading.main_thread().name) == 2, "the first task, of two files, shows that reading waits"
    assert len(readers) == 6
    assert read_by_threads.fingerprint == read_by_main_thread.fingerprint
    assert read_by_threads.quarantined == read_by_main_thread.quarantined


def test_an_epoch_of_too_many_repeated_uses_is_rejected(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recipe([row("a", "b")] * 3)
    sources = [{"path": tmp_path / "train.json", "weight": weight} for weight in (0.5, 4.0)]
    monkeypatch.setattr(data_index, "MAX_REPEATED_USES", 9)
    weighted = recipe([row("a", "b")] * 3, sources=sources)
    assert build_index(weighted).weights.tolist() == [0.5] * 3 + [4.0] * 3
    monkeypatch.setattr(data_index, "MAX_REPEATED_USES", 8)
    with pytest.raises(DataError, match=r"train\.json has weight 4; .* would repeat samples 9 times, allowed: 8"):
        build_index(weighted)
    build_index(made)


def test_a_weight_of_a_million_is_rejected_by_the_recipe(tmp_path: Path, recipe: MakeRecipe) -> None:
    with pytest.raises(ValueError, match="less than or equal to 10000"):
        recipe([row("a", "b")], sources=[{"path": tmp_path / "train.json", "weight": 1e6}])
