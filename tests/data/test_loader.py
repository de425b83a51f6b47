import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmtrain.balance import Grouping
from mmtrain.data import BatchBuilder, ChatTokenizer, GroupStream, Loader, PayloadNeed, StepRequest
from mmtrain.data.loading.prefetch_window import PrefetchWindow
from mmtrain.data.media.vision_items import VisionItemDecoder
from mmtrain.errors import RunError, TooManyBadSamples
from mmtrain.recipe.settings.schema import Recipe
from tests.data.steps import DP, EVERYTHING, ONE, TWO, Dataset
from tests.waiting import MAX_WAIT_S

MakeRecipe = Callable[..., Recipe]


def test_payload_follows_the_batch_meta(made: Dataset) -> None:
    recipe, index, stream = made()
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
    with Loader(index, stream, recipe, StepRequest(0, DP, TWO, EVERYTHING)) as loader:
        data = next(loader)
    meta = data.meta
    assert set(data.encoders["vision"]) == {(0, 0), (0, 1)}
    assert set(data.text) == {(r, i) for r in range(2) for i in range(2)}
    for (r, i), text in data.text.items():
        samples = meta.sample_id[meta.microbatch(r, i)]
        encoded = [tokenizer.encode(index.samples[s], index.media_features(s)) for s in samples]
        assert text.ids is not None
        assert text.labels is not None
        assert text.lengths == tuple(len(e.ids) for e in encoded)
        assert text.ids.tolist() == [t for e in encoded for t in e.ids]
        assert text.labels.tolist() == [t for e in encoded for t in e.labels]
        assert int((text.labels != -100).sum()) == meta.targets[meta.microbatch(r, i)].sum()
        places = text.feature_positions["vision"]
        assert (text.ids[places] == tokenizer.item_ids["vision"][0]).all()
        assert len(places) == sum(sum(index.unit_features(s, "vision")) for s in samples)
    table = meta.items["vision"]
    for (r, i), vision in data.encoders["vision"].items():
        item_numbers = table.microbatch(r, i)
        images = [index.samples[meta.sample_id[table.sample[j]]].images[table.position[j]] for j in item_numbers]
        shapes = list(zip(vision.rows, vision.cols, strict=True))
        pictures = VisionItemDecoder(recipe.data.image, 8)
        expected = [pictures.patches("image", p, 0, 1, shape) for p, shape in zip(images, shapes, strict=True)]
        expected = expected or [np.empty((0, 192))]
        assert vision.cells is not None
        assert np.array_equal(vision.cells, np.concatenate(expected))


def test_padding_stands_behind_each_sample_and_has_no_target(made: Dataset) -> None:
    recipe, index, _ = made()
    grouping = Grouping(recipe.data.seq_len, 100, 4, "random", pad=True)
    plain, padded = (GroupStream(index.lengths, replace(grouping, pad=pad), seed=0) for pad in (False, True))
    with Loader(index, padded, recipe, StepRequest(0, DP, TWO, EVERYTHING)) as loader:
        data = next(loader)
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
    assert data.meta.padding is not None
    assert data.meta.padding.sum() > 0
    for (replica, i), text in data.text.items():
        samples = data.meta.sample_id[data.meta.microbatch(replica, i)]
        assert text.ids is not None
        assert text.labels is not None
        start = 0
        for sample, length in zip(samples, text.lengths, strict=True):
            encoded = tokenizer.encode(index.samples[sample], index.media_features(sample))
            end = start + len(encoded.ids)
            assert text.ids[start:end].tolist() == encoded.ids.tolist()
            assert text.labels[start:end].tolist() == encoded.labels.tolist()
            start += length
            assert (text.labels[end:start] == -100).all()
        assert len(set(text.lengths)) == 1
        assert start == len(text.ids)
        features = sum(sum(index.unit_features(s, "vision")) for s in samples)
        assert len(text.feature_positions["vision"]) == features, "padding takes no feature"
    assert plain.batch(0, 4, DP, TWO).padding is None


def test_a_rank_gets_only_the_payload_it_needs(made: Dataset) -> None:
    recipe, index, stream = made()
    needs = (PayloadNeed("vision", 0), PayloadNeed("llm", 1, labels=True))
    with Loader(index, stream, recipe, StepRequest(0, DP, TWO, needs)) as loader:
        data = next(loader)
    assert set(data.text) == {(1, 0), (1, 1)}
    assert all(v.cells is None and len(v.rows) == len(v.cols) for v in data.encoders["vision"].values())
    assert sum(len(v.rows) for v in data.encoders["vision"].values()) == len(data.meta.items["vision"].sample)
    assert all(t.ids is None and t.labels is not None and t.feature_positions == {} for t in data.text.values())
    meta_only = BatchBuilder(index, recipe, (PayloadNeed("llm", 0),), TWO).build(data.meta)
    expected = tuple(data.meta.tokens[data.meta.microbatch(0, 0)].tolist())
    assert (meta_only.text[0, 0].lengths, meta_only.text[0, 0].labels) == (expected, None)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_steps_come_in_order_from_any_start(made: Dataset, prefetch: int) -> None:
    recipe, index, stream = made(prefetch=prefetch)
    with Loader(index, stream, recipe, StepRequest(5, DP, ONE, EVERYTHING)) as loader:
        steps = [next(loader) for _ in range(6)]
    assert [s.meta.step for s in steps] == list(range(5, 11))
    direct = GroupStream(index.lengths, Grouping(recipe.data.seq_len, 100, 2), seed=0).batch(7, 2, DP, ONE)
    assert steps[2].meta.sample_id.tolist() == direct.sample_id.tolist()


def test_an_error_in_the_background_names_the_sample(made: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, index, stream = made(prefetch=2)
    bad = int(stream.groups(2, 2)[0][0])
    encode = ChatTokenizer.encode

    def failing(self: ChatTokenizer, sample: Any, features: Any) -> Any:
        if sample == index.samples[bad]:
            raise ValueError("boom")
        return encode(self, sample, features)

    monkeypatch.setattr(ChatTokenizer, "encode", failing)
    with Loader(index, stream, recipe, StepRequest(0, DP, ONE, EVERYTHING)) as loader:
        assert next(loader).meta.step == 0
        for _ in range(2):  # the second call raises the same error instead of blocking
            with pytest.raises(RunError, match=rf"sample '{bad}' .* cannot be encoded: ValueError: boom"):
                next(loader)


def test_any_other_error_names_its_step(made: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, index, stream = made(prefetch=2)

    def failing(*_: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(BatchBuilder, "build", failing)
    with (
        Loader(index, stream, recipe, StepRequest(3, DP, ONE, EVERYTHING)) as loader,
        pytest.raises(RunError, match="preparing step 3 failed: KeyError: 'lost'"),
    ):
        next(loader)


def test_closing_ends_the_thread(made: Dataset) -> None:
    recipe, index, stream = made(prefetch=1)
    before = threading.active_count()
    loader = Loader(index, stream, recipe, StepRequest(0, DP, ONE, EVERYTHING))
    next(loader)
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RunError, match="closed"):
        next(loader)
    loader.close()


def test_prefetch_stays_within_its_bound(made: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, index, stream = made(prefetch=2)
    built: list[int] = []
    fourth, full = threading.Event(), threading.Event()
    build_batch, claimable = BatchBuilder.build, PrefetchWindow._claimable

    def counting(self: BatchBuilder, meta: Any) -> Any:
        built.append(meta.step)
        if len(built) == 4:
            fourth.set()
        return build_batch(self, meta)

    def watched(self: PrefetchWindow[Any]) -> int | None:
        step = claimable(self)
        if step is None:
            full.set()
        return step

    monkeypatch.setattr(BatchBuilder, "build", counting)
    monkeypatch.setattr(PrefetchWindow, "_claimable", watched)
    with Loader(index, stream, recipe, StepRequest(0, DP, ONE, EVERYTHING)) as loader:
        assert full.wait(MAX_WAIT_S)
        assert built == [0, 1, 2], "two are ready, a third waits for room, and there is no step to claim"
        next(loader)
        assert fourth.wait(MAX_WAIT_S)


def test_an_image_that_breaks_after_indexing_becomes_zeros_and_is_quarantined_once(made: Dataset) -> None:
    recipe, index, stream = made(max_bad_rate=1.0)
    victim = next(s for s in index.samples if len(s.images) == 2)
    Path(str(victim.images[1])).write_bytes(b"gone bad")
    with Loader(index, stream, recipe, StepRequest(0, DP, ONE, EVERYTHING)) as loader:
        steps = [next(loader) for _ in range(40)]  # several epochs
    assert steps[-1].meta.epoch >= 2
    named = [q for s in steps for q in s.quarantined]
    assert [(q.id, q.kind) for q in named] == [(victim.id, "not_an_image")]
    affected = next(s for s in steps if s.quarantined)
    table, vision = affected.meta.items["vision"], affected.encoders["vision"][0, 0]
    lo = 0
    for j, r, c in zip(table.microbatch(0, 0), vision.rows, vision.cols, strict=True):
        is_victim = index.samples[affected.meta.sample_id[table.sample[j]]] == victim and table.position[j] == 1
        assert vision.cells is not None
        assert (not vision.cells[lo : lo + r * c].any()) == is_victim
        lo += r * c


def test_broken_images_count_towards_the_allowed_rate(made: Dataset) -> None:
    recipe, index, stream = made(max_bad_rate=0.1)
    for sample in [s for s in index.samples if s.images][:2]:
        Path(str(sample.images[0])).unlink()
    with Loader(index, stream, recipe, StepRequest(0, DP, ONE, EVERYTHING)) as loader:
        steps = iter(loader)
        with pytest.raises(TooManyBadSamples, match="2 of 12 samples are unusable"):
            list(itertools.islice(steps, 40))
