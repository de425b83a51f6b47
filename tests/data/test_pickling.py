"""What crosses the border of a process: tokenizers of all kinds of folder encode the same on the other side."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest

from mmtrain.data import GroupStream, PayloadNeed, Sample, Turn, build_index
from mmtrain.data.loading.batch_builder import StepBuilder, StepRequest
from mmtrain.data.loading.worker_pool import find_unpicklable, pickle_for_process
from mmtrain.data.service.producer import Producer
from mmtrain.data.text.template_tokenizer import TemplateTokenizer
from mmtrain.errors import RunError
from mmtrain.families import FAMILIES as MODEL_FAMILIES
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.fake_step_builders import FakeStepBuilder, UnsendableStepBuilder
from tests.data.model_folders import FAMILIES, Family, draw_text, write_folder
from tests.data.steps import same
from tests.flow.tiny_families import load_tiny_recipe
from tests.weights.test_tiny_model import VARIANTS

FOLDERS = {**MODEL_FAMILIES, **VARIANTS}


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


QUICK = ("gemma3", "qwen2_5_omni", "qwen3_vl")  # pictures of one size and of any, and clips beside them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOLDERS]
)
def test_steps_of_every_family_are_the_same_after_pickling(tmp_path: Path, name: str) -> None:
    """Send what builds steps as a pool of workers does: index, stream, tokenizer and the settings of processors."""
    folder = tmp_path / "model"
    write_tiny_model(FOLDERS[name], folder, seed=0, num_train=48)
    recipe = load_tiny_recipe(folder, "{}", f"data.sources.0.path={folder}/conversations/train.json").recipe
    index = build_index(recipe)
    builder = StepBuilder(index, GroupStream.of(recipe, index), recipe)
    encoders = tuple(recipe.model.all_encoders)
    ones = dict.fromkeys((*encoders, "llm"), 1)
    needs = (*(PayloadNeed(unit, 0, media=True) for unit in encoders), PayloadNeed("llm", 0, ids=True, labels=True))
    request = StepRequest(0, ones, dict.fromkeys(ones, 4), needs)
    sent: StepBuilder = pickle.loads(pickle_for_process(builder, "a test"))
    assert same(sent.build(request), builder.build(request))


def test_a_producer_whose_workers_cannot_start_leaves_its_address() -> None:
    """Its context would wait at exit for a socket that stays open, after the message that names what is wrong."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(RunError, match=r"readers\['video'\].* cannot be sent to loader workers"):
        Producer(UnsendableStepBuilder(), {}, address, 1, print)  # type: ignore[arg-type]
    Producer(FakeStepBuilder(), {}, address, 1, print)._close()  # type: ignore[arg-type]


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
