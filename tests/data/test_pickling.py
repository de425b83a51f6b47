"""What crosses the border of a process: tokenizers of all kinds of folder encode the same on the other side."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from mmtrain.data import Sample, Turn
from mmtrain.data.loading.pickling import find_unpicklable
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from tests.data.model_folders import FAMILIES, Family, draw_text, write_folder


def draw_sample(family: Family, random: Random, number: int) -> Sample:
    """Draw questions and answers; some spell a special token."""
    turns = [Turn("system", draw_text(random))] if family.has_system else []
    for _ in range(random.randint(1, 3)):
        spelled = random.choice(("", "", family.special[-1]))
        turns += [Turn("user", draw_text(random) + spelled), Turn("assistant", draw_text(random))]
    return Sample("drawn", "", number, tuple(turns), ())


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("was_used", [False, True])
def test_tokenizers_encode_the_same_after_pickling(tmp_path: Path, name: str, was_used: bool) -> None:
    family = FAMILIES[name]
    tokenizer = TemplateTokenizer.load(write_folder(tmp_path, family), family.markups)
    samples = [draw_sample(family, Random(number), number) for number in range(20)]
    if was_used:
        for sample in samples:
            tokenizer.encode(sample, {})
    sent: TemplateTokenizer = pickle.loads(pickle.dumps(tokenizer, pickle.HIGHEST_PROTOCOL))
    count, count_sent = tokenizer.length_counter(10_000), sent.length_counter(10_000)
    for sample in samples:
        encoded, encoded_there = tokenizer.encode(sample, {}), sent.encode(sample, {})
        np.testing.assert_array_equal(encoded_there.ids, encoded.ids)
        np.testing.assert_array_equal(encoded_there.labels, encoded.labels)
        np.testing.assert_array_equal(sent.prompt_ids(sample, {}), tokenizer.prompt_ids(sample, {}))
        assert count_sent(sample, {}) == count(sample, {})
    assert (sent.end_ids, sent.item_ids, sent.warnings) == (tokenizer.end_ids, tokenizer.item_ids, tokenizer.warnings)


def bad() -> Callable[[], int]:
    return lambda: 0


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (bad(), ""),
        ([0, (bad(),)], "[1][0]"),
        (SimpleNamespace(tokenizer=SimpleNamespace(template=bad())), ".tokenizer.template"),
        (partial(int, bad()), "(state 1)[0]"),
        (open, ""),  # can be pickled: there is no part to name
    ],
)
def test_the_part_that_cannot_be_pickled_is_found(value: object, path: str) -> None:
    assert find_unpicklable(value)[0].endswith(path)
