"""Samples that are too long are cut, and never inside of a medium."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmtrain.balance.assign import assign
from mmtrain.data import BatchBuilder, PayloadNeed, build_index
from mmtrain.data.formats.sample import Sample, SampleCut, Turn
from mmtrain.data.index import index_cache
from mmtrain.data.index.data_check import check_sources_for_recipe
from mmtrain.data.index.sample_table import content_json, sample_from_record, sample_record
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.data.text.cut_samples import (
    MAX_CUT_CHARACTERS,
    cut_encoded,
    features_of_cut,
    find_cut,
    make_cut,
    tokens_of_items,
)
from mmtrain.data.text.load_tokenizer import load_recipe_tokenizer
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, TimedItems
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.errors import DataError
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.runtime.evaluation.qa_eval import select_questions
from tests.data.model_folders import FAMILIES, write_folder
from tests.data.rows import Row, row

WORDS = "What colour is the circle? red How many shapes? "
DP = {"vision": 1, "llm": 1}
# GLM-4V's tokens of images are known of its whole folder alone.
IMAGE_FAMILIES = [name for name in sorted(FAMILIES) if "image" in FAMILIES[name].media and name != "glm4v"]


def long_rows() -> list[Row]:
    """Return a short sample, one that is cut in its answer, in its second image, and in its question."""
    return [
        row("hi", "yes"),
        row("hi<image>", WORDS * 20, "a.png"),
        {
            "image": ["a.png", "b.png"],
            "conversations": [
                {"from": "human", "value": "<image>What?"},
                {"from": "gpt", "value": "red"},
                {"from": "human", "value": f"{'x' * 20}<image>{WORDS}"},
                {"from": "gpt", "value": "blue"},
            ],
        },
        row(WORDS * 20, "yes"),
    ]


@pytest.fixture
def cutting(recipe: Callable[..., Recipe], picture: Callable[..., Path]) -> Callable[..., Recipe]:
    picture("a.png", 32, 16)
    picture("b.png", 32, 32)
    return lambda **data: recipe(long_rows(), **{"too_long": "cut", "max_sample_tokens": 48, "seq_len": 64} | data)


def test_the_first_tokens_of_long_samples_train(cutting: Callable[..., Recipe]) -> None:
    settings = cutting()
    index, tokenizer = build_index(settings), load_recipe_tokenizer(settings)
    uncut = cutting(too_long="reject", seq_len=4096, max_sample_tokens=None)
    whole = build_index(uncut)
    assert "data.too_long = cut: 2 samples are cut to 48 tokens" in index.warnings
    (bad,) = index.quarantined
    assert (bad.index, bad.kind) == (3, "too_long")
    assert bad.reason.endswith("data.max_sample_tokens = 48; the first 48 hold nothing to learn")
    assert index.lengths.tokens[[0, 1]].tolist() == [whole.lengths.tokens[0], 48]

    numbers = np.arange(3)
    meta = assign(0, 0, [numbers], index.lengths, DP, DP)
    needs = (PayloadNeed("llm", 0, ids=True, labels=True), PayloadNeed("vision", 0, media=True))
    step = BatchBuilder(index, settings, needs, DP).build(meta)
    text = step.text[0, 0]
    assert text.ids is not None
    assert text.labels is not None
    start = 0
    for number in numbers:
        full = tokenizer.encode(whole.samples[number], whole.media_features(number))
        length = int(index.lengths.tokens[number])
        of_sample = slice(start, start + length)
        assert text.ids[of_sample].tolist() == full.ids[:length].tolist()
        labels = full.labels[:length].copy()
        if length < len(full.ids):
            labels[-1] = IGNORE_INDEX
        assert text.labels[of_sample].tolist() == labels.tolist()
        assert index.lengths.targets[number] == (labels != IGNORE_INDEX).sum()
        start += length
    # Of the third sample the second image is left out, as a whole, and what follows.
    item_id = tokenizer.item_ids["vision"][0]
    of_whole = tokenizer.encode(whole.samples[2], whole.media_features(2)).ids
    first_of_second = np.flatnonzero(of_whole == item_id)[whole.media_features(2)["vision"][0]]  # type: ignore[call-overload]
    assert index.lengths.tokens[2] == first_of_second < 48
    first = index.lengths.items["vision"].first
    assert [int(n) for n in np.diff(first[0:4])] == [0, 1, 1]
    assert len(text.feature_positions["vision"]) == (text.ids == item_id).sum()
    assert len(step.encoders["vision"][0, 0].rows) == 2


def test_a_cut_is_part_of_what_is_cached_and_compared(
    tmp_path: Path, cutting: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "MIN_SOURCE_BYTES", 0)
    settings = cutting(index_cache=tmp_path / "cache")
    first, again = build_index(settings), build_index(settings)
    assert again.cache_folder is not None
    assert list(again.samples) == list(first.samples)
    assert [sample.cut is not None for sample in again.samples] == [False, True, True]
    assert again.fingerprint == first.fingerprint
    rejecting = build_index(cutting(index_cache=tmp_path / "cache", too_long="reject"))
    assert len(rejecting.samples) == 1
    assert rejecting.fingerprint != first.fingerprint


def test_checks_read_the_media_before_the_cut_and_questions_are_whole_samples(cutting: Callable[..., Recipe]) -> None:
    settings = cutting()
    report = check_sources_for_recipe(settings, settings.data.sources)
    assert report.media == {"image": 1}
    assert report.kinds == {"too_long": 1}
    assert [question.number for question in select_questions(build_index(settings), None)] == [0]


def test_texts_that_would_take_minutes_in_every_step_are_not_cut(recipe: Callable[..., Recipe]) -> None:
    long = row("hi", "x" * MAX_CUT_CHARACTERS)
    (bad,) = build_index(recipe([row("hi", "yes"), long], too_long="cut")).quarantined
    assert bad.reason.endswith("data.seq_len = 64; texts above 1,048,576 characters are not cut: divide them")
    with pytest.raises(DataError, match=r"raise it, or shorten the samples\. The first one"):
        build_index(recipe([row("hi", WORDS * 20)], max_bad_rate=0.5))


@pytest.mark.parametrize("name", IMAGE_FAMILIES)
def test_no_cut_of_a_template_falls_into_an_image(tmp_path: Path, name: str) -> None:
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, FAMILIES[name]))
    turns = (Turn("user", "<image>What? <image>And?"), Turn("assistant", "red, blue"))
    sample = Sample("a", "x.json", 0, turns, (FileMedia("a.png"), FileMedia("b.png")))
    features = {"vision": [4, 6]}
    encoded = tokenizer.encode(sample, features)
    is_item = np.isin(encoded.ids, tokenizer.item_ids["vision"])
    item_ids = {modality: ids for modality, ids in tokens_of_items(tokenizer).items() if modality in features}
    for max_tokens in range(1, len(encoded.ids)):
        end, num_whole = find_cut(encoded.ids, item_ids, features, max_tokens)
        assert is_item[:end].sum() == sum(features["vision"][: num_whole["vision"]])
        assert end == max_tokens or is_item[end : max_tokens + 1].all() or is_item[end:].sum() > 0
        # It is the longest: one token more than `end` would be too many, or begin a medium that does not fit.
        assert end == max_tokens or is_item[end]
        kept = cut_encoded(encoded, end)
        assert kept.ids.tolist() == encoded.ids[:end].tolist()
        assert len(kept.labels) == end
    assert find_cut(encoded.ids, item_ids, features, len(encoded.ids)) == (len(encoded.ids), {"vision": 2})


def test_media_that_alternate_are_left_out_together() -> None:
    ids = np.array([9, 1, 2, 1, 2, 9])  # an image and a clip whose tokens alternate
    item_ids, features = {"vision": (1,), "audio": (2,)}, {"vision": [2], "audio": [2]}
    ends = [find_cut(ids, item_ids, features, most)[0] for most in range(7)]
    assert ends == [0, 1, 1, 1, 1, 5, 6]


def test_a_record_keeps_the_cut() -> None:
    features = {"vision": [3, (2, 2), TimedItems((1, 2), (0, 5))], "audio": []}
    cut = make_cut(7, features)
    assert features_of_cut(cut) == features
    for tools in ("", '[{"type": "function"}]'):
        for images in ((), (FileMedia("/a.png"),)):
            turns = (Turn("assistant", "x"),)
            sample = Sample("a", "x.json", 0, turns, (), tools=tools, target_images=images, cut=cut)
            assert sample_from_record(sample_record(sample, content_json(sample))) == sample
    assert isinstance(cut, SampleCut)
