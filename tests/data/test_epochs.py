"""`train.epochs`: each sample is used once in each, whatever the replicas, and whenever a run is stopped."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import SampleLengths
from mmtrain.balance.grouping.methods import GROUPING_METHODS, Grouping
from mmtrain.data import build_index
from mmtrain.data.stream.count_groups import count_groups
from mmtrain.data.stream.count_steps import estimate_epoch, with_counted_steps, with_estimated_steps
from mmtrain.data.stream.group_stream import GroupStream
from mmtrain.errors import RecipeError
from mmtrain.families import FAMILIES
from mmtrain.recipe import dump_recipe, load_recipe
from mmtrain.recipe.settings.schema import Recipe
from mmtrain.weights.tiny_model import write_tiny_model
from tests.data.rows import row

ROOT = Path(__file__).parents[2]


def lengths_of(tokens: np.ndarray) -> SampleLengths:
    return SampleLengths(tokens, tokens // 2, {})


def used(stream: GroupStream, steps: range, groups: int, dp: int) -> Counter[int]:
    """Count how often steps use each sample, as replicas of the LLM get them."""
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(stream.batch(step, groups, {"llm": dp}, {"llm": groups // dp}).sample_id.tolist())
    return counts


@pytest.mark.parametrize("method", sorted(GROUPING_METHODS))
@pytest.mark.parametrize("num_samples", [173, 1000, 1999])
def test_an_epoch_of_whole_steps_uses_each_sample_once(method: Any, num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    lengths = lengths_of(rng.integers(10, 200, num_samples))
    grouping = Grouping(seq_len=400, window=300, global_batch=12, method=method, whole_epochs=True)
    stream = GroupStream(lengths, grouping, seed=5)
    assert stream.steps_per_epoch == int(stream.steps_per_epoch)
    steps = int(stream.steps_per_epoch)
    first, second = range(steps), range(steps, 2 * steps)
    assert used(stream, first, 12, dp=2) == Counter(range(num_samples))
    assert used(stream, second, 12, dp=6) == Counter(range(num_samples))
    uneven = GroupStream(lengths, Grouping(seq_len=400, window=300, global_batch=12, method=method), seed=5)
    assert steps - 1 < uneven.steps_per_epoch <= steps


def test_a_run_that_is_stopped_goes_on_with_the_samples_that_are_left() -> None:
    """Another process, with another number of replicas, computes the same stream from the step on."""
    lengths = lengths_of(np.random.default_rng(1).integers(10, 200, 1000))
    grouping = Grouping(seq_len=400, window=256, global_batch=8, whole_epochs=True)
    before, after = (GroupStream(lengths, grouping, seed=3) for _ in range(2))
    steps = int(before.steps_per_epoch)
    counts = used(before, range(steps // 3), 8, dp=2) + used(after, range(steps // 3, steps), 8, dp=8)
    assert counts == Counter(range(1000))


def test_weights_say_how_often_an_epoch_uses_a_sample() -> None:
    lengths = lengths_of(np.random.default_rng(2).integers(10, 200, 600))
    weights = np.where(np.arange(600) % 3 == 0, 2.0, 1.0)
    grouping = Grouping(seq_len=400, window=256, global_batch=8, whole_epochs=True)
    stream = GroupStream(lengths, grouping, 3, weights)
    counts = used(stream, range(int(stream.steps_per_epoch)), 8, dp=4)
    assert counts == Counter({sample: int(weight) for sample, weight in enumerate(weights)})


def test_samples_that_fill_groups_alone_cannot_be_divided() -> None:
    """Then epochs end inside of steps, as without the setting."""
    lengths = lengths_of(np.full(50, 390))
    grouping = Grouping(seq_len=400, window=64, global_batch=8, whole_epochs=True)
    assert GroupStream(lengths, grouping, seed=0).groups_per_epoch == 50


@pytest.fixture
def epochs(recipe: Callable[..., Recipe]) -> Callable[..., Recipe]:
    def make(**train: Any) -> Recipe:
        made = recipe([row("why?" * (1 + s % 5), f"answer {s}", name=str(s)) for s in range(60)])
        return Recipe.model_validate({**made.model_dump(), "train": {"optimizer": {"lr": 1e-3}, **train}})

    return make


@pytest.mark.parametrize(("num_epochs", "batch"), [(1, 4), (2, {"samples": 8}), (2.5, 3), (0.5, {"tokens": 200})])
def test_steps_are_those_of_the_epochs(epochs: Callable[..., Recipe], num_epochs: float, batch: Any) -> None:
    settings = epochs(epochs=num_epochs, global_batch=batch)
    index = build_index(settings)
    settings = count_groups(settings, index.lengths)
    counted = with_counted_steps(settings, index)
    per_epoch = GroupStream.of(settings, index).steps_per_epoch
    assert counted.train.num_steps == max(1, round(num_epochs * per_epoch))
    assert with_estimated_steps(settings, index.lengths).train.num_steps == pytest.approx(
        counted.train.num_steps, abs=1 + 0.1 * counted.train.num_steps
    )
    assert estimate_epoch(settings, index.lengths).samples == pytest.approx(60)
    assert "steps: null" in dump_recipe(counted)


def test_a_later_setting_replaces_its_alternative(tmp_path: Path, recipe: Callable[..., Recipe]) -> None:
    base, above = tmp_path / "base.yaml", tmp_path / "above.yaml"
    base.write_text(dump_recipe(recipe([row("a", "b")])))
    above.write_text("extends: base.yaml\ntrain: {epochs: 2, optimizer: {warmup_ratio: 0.1}}\n")
    loaded = load_recipe(above).recipe.train
    assert (loaded.steps, loaded.epochs) == (None, 2)
    loaded = load_recipe(above, ["train.steps=7", "train.optimizer.warmup_steps=3"]).recipe.train
    assert (loaded.steps, loaded.epochs) == (7, None)
    assert (loaded.optimizer.warmup_steps, loaded.optimizer.warmup_ratio) == (3, None)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({}, "train.steps: missing; allowed: a number of steps, or train.epochs"),
        ({"steps": 3, "epochs": 1}, "train.epochs: found 1 beside train.steps 3; allowed: one of both"),
    ],
)
def test_a_recipe_states_one_of_both(
    tmp_path: Path, recipe: Callable[..., Recipe], train: dict[str, Any], message: str
) -> None:
    text = dump_recipe(recipe([row("a", "b")])).replace("  steps: 1\n", "").replace("  epochs: null\n", "")
    path = tmp_path / "r.yaml"
    path.write_text(text.replace("train:\n", "train:\n" + "".join(f"  {k}: {v}\n" for k, v in train.items())))
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "texts", "samples_per_step"), [("llava_sft", (150, 900), 128), ("llava_align", (30, 50), 256)]
)
def test_recipes_that_speak_of_an_epoch_make_one(
    tmp_path: Path, name: str, texts: tuple[int, int], samples_per_step: int
) -> None:
    """On lengths like those of the paper's data, with as many samples in a step as the paper has."""
    rng = np.random.default_rng(0)
    rows = [f"{text},24x24" for text in rng.integers(*texts, 40_000)]
    (tmp_path / "stated.csv").write_text("\n".join(["text,vision", *rows]))
    write_tiny_model(FAMILIES["llava"], tmp_path / "llava", seed=0, num_train=4)
    settings = [f"model.hf={tmp_path}/llava", f"data.sources.0.path={tmp_path}/stated.csv"]
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", settings).recipe
    index = build_index(recipe)
    recipe = count_groups(recipe, index.lengths)
    stream = GroupStream.of(recipe, index)
    num_steps = with_counted_steps(recipe, index).train.num_steps
    assert stream.epochs_done(num_steps * recipe.train.num_groups) == pytest.approx(1.0, abs=0.02)
    assert num_steps == pytest.approx(40_000 / samples_per_step, rel=0.05)
    estimated = with_estimated_steps(recipe, index.lengths).train.num_steps
    assert estimated == pytest.approx(num_steps, rel=0.02)
