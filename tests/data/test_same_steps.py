"""Order and content of steps do not depend on what builds them, on the number of ranks, or on a resume."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mmtrain.balance import BalancedLoad, PipelineRank, SequenceCost, StepTargets
from mmtrain.data import DataIndex, GroupStream, Loader, PayloadNeed, StepData, StepRequest
from mmtrain.recipe.settings.schema import Recipe
from tests.data.producers import Served, asking
from tests.data.steps import Dataset, leaves

GROUPS, FIRST, LAST = 4, 3, 9
TARGETS = StepTargets(
    loads=(
        BalancedLoad({"vision": SequenceCost(9, 1)}, 0.4),
        BalancedLoad({"llm": SequenceCost(5), "vision": SequenceCost(1)}, 0.6),
    ),
    pipeline=(
        PipelineRank({"vision": SequenceCost(3)}, {"vision": SequenceCost(6)}),
        PipelineRank({"llm": SequenceCost(5)}, {"llm": SequenceCost(10)}),
    ),
    item_costs={"vision": SequenceCost(9, 1)},
    replica_nodes={"vision": (0,), "llm": (0,)},
)
Content = tuple[list[tuple[int, bytes, bytes]], list[tuple[int, int, bytes]]]


def content(step: StepData, replica: int) -> Content:
    """Return the texts by sample, and the images by (sample, position), of one replica."""
    texts, images = [], []
    meta = step.meta
    table = step.meta.items["vision"]
    for (r, i), text in step.text.items():
        assert r == replica
        lo = 0
        assert text.ids is not None
        assert text.labels is not None
        for sample, length in zip(meta.sample_id[meta.microbatch(r, i)].tolist(), text.lengths, strict=True):
            texts.append((sample, text.ids[lo : lo + length].tobytes(), text.labels[lo : lo + length].tobytes()))
            lo += length
    for (r, i), vision in step.encoders["vision"].items():
        lo = 0
        assert vision.cells is not None
        for item, rows, cols in zip(table.microbatch(r, i), vision.rows, vision.cols, strict=True):
            sample = int(meta.sample_id[table.sample[item]])
            images.append((sample, int(table.position[item]), vision.cells[lo : lo + rows * cols].tobytes()))
            lo += rows * cols
    return texts, images


def steps(
    recipe: Recipe, index: DataIndex, stream: GroupStream, ranks: int, first: int, targets: StepTargets = TARGETS
) -> list[Content]:
    """Return what `ranks` ranks together see in each of the steps [first, LAST)."""
    dp = dict.fromkeys(("vision", "llm"), ranks)
    microbatches = dict.fromkeys(dp, GROUPS // ranks)
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                Loader(index, stream, recipe, StepRequest(first, dp, microbatches, needs, targets), 1, fail_on_note)
            )
            for needs in (
                (PayloadNeed("vision", r, media=True), PayloadNeed("llm", r, ids=True, labels=True))
                for r in range(ranks)
            )
        ]
        contents = []
        for step in range(first, LAST):
            parts = [content(data, r) for r, data in enumerate(map(next, loaders)) if data.meta.step == step]
            assert len(parts) == ranks
            contents.append(tuple(sorted(entry for part in parts for entry in part[kind]) for kind in range(2)))
    return contents  # type: ignore[return-value]


def fail_on_note(note: str) -> None:
    raise AssertionError(note)


@pytest.mark.parametrize("who", ["thread", "workers", "producer"])
def test_steps_are_the_same(made: Dataset, tmp_path: Path, who: str) -> None:
    settings: dict[str, dict[str, Any]] = {"thread": {}, "workers": {"workers": 2}, "producer": {}}
    recipe, index, stream = made(seq_len=28, prefetch=2, **settings[who])
    expected = steps(made(seq_len=28, prefetch=0)[0], index, stream, 1, 0, StepTargets())
    assert len({str(step[0]) for step in expected}) > len(expected) // 2, "few samples, but not the same in each step"
    with ExitStack() as stack:
        if who == "producer":
            recipe = asking(recipe, stack.enter_context(Served(recipe, tmp_path)).address)
        # Each rank starts workers of its own, and starting them takes longer than all steps.
        for ranks in (1, 2) if who == "workers" else (1, 2, 4):
            assert steps(recipe, index, stream, ranks, FIRST) == expected[FIRST:], f"{ranks} ranks"


@pytest.mark.parametrize("who", ["thread", "workers", "producer"])
def test_a_step_is_laid_out_the_same_by_every_builder(made: Dataset, tmp_path: Path, who: str) -> None:
    recipe, index, stream = made(seq_len=60, prefetch=2, **({"workers": 2} if who == "workers" else {}))
    dp, counts = {"vision": 1, "llm": 2}, {"vision": 3, "llm": 3}
    expected_batches = [stream.batch(step, 6, dp, counts, TARGETS) for step in range(4)]
    plain = [stream.batch(step, 6, dp, counts) for step in range(4)]
    assert any(a.sample_id.tolist() != b.sample_id.tolist() for a, b in zip(expected_batches, plain, strict=True))
    assert all(sorted(a.sample_id) == sorted(b.sample_id) for a, b in zip(expected_batches, plain, strict=True))
    with ExitStack() as stack:
        if who == "producer":
            recipe = asking(recipe, stack.enter_context(Served(recipe, tmp_path)).address)
        needs = (PayloadNeed("vision", 0, media=True), PayloadNeed("llm", 1, labels=True))
        loader = stack.enter_context(
            Loader(index, stream, recipe, StepRequest(0, dp, counts, needs, TARGETS), 1, fail_on_note)
        )
        for expected, step in zip(expected_batches, loader, strict=False):
            assert list(leaves(step.meta)) == list(leaves(expected))
