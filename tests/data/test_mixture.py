"""Sources that make up shares of training: what steps hold, whatever step a run starts at."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import Grouping, SampleLengths, columns
from mmtrain.balance.columns import StoredColumn
from mmtrain.balance.grouping.methods import GroupingMethod
from mmtrain.balance.grouping.mixture import Mixture, ShareUnit, mixture_phases
from mmtrain.data import DataIndex, GroupStream, build_index
from mmtrain.data.index.shared_arrays import SharedArrays
from mmtrain.data.stream import mixture_stream
from mmtrain.data.stream.recipe_summaries import summarize_sources
from mmtrain.errors import DataError
from mmtrain.planning.space.sample_batches import sample_batches
from mmtrain.recipe.settings.schema import Recipe
from tests.data.test_group_stream import METHODS, contents

GLOBAL_BATCH, SEQ_LEN = 8, 100
MEAN_TOKENS = (5, 20, 40)


def make_lengths(seed: int, counts: tuple[int, ...]) -> tuple[SampleLengths, np.ndarray]:
    """Return the lengths of samples of several sources, longer in each, and the source of each sample."""
    rng = np.random.default_rng(seed)
    sources = np.repeat(np.arange(len(counts)), counts)
    tokens = rng.integers(1, 2 * np.array(MEAN_TOKENS)[sources])
    return SampleLengths(tokens, np.ones_like(tokens), {}), sources


def make_stream(
    shares: list[dict[int, float]],
    counts: tuple[int, ...] = (300, 200, 50),
    unit: ShareUnit = "tokens",
    method: GroupingMethod = "matched",
    window: int = 256,
) -> tuple[GroupStream, SampleLengths, np.ndarray]:
    lengths, sources = make_lengths(1, counts)
    grouping = Grouping(SEQ_LEN, window, GLOBAL_BATCH, method)
    mixture = Mixture(sources, mixture_phases(shares), unit)
    return GroupStream(lengths, grouping, 3, mixture=mixture), lengths, sources


def used(stream: GroupStream, first_step: int, num_steps: int) -> np.ndarray:
    """Return the samples of some steps, in the order of training."""
    return np.concatenate(stream.groups(first_step * GLOBAL_BATCH, num_steps * GLOBAL_BATCH))


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 9), st.integers(1, 7), st.integers(0, 3000))
def test_a_source_gives_out_its_samples_by_the_place_of_their_first_token(
    seed: int, num_samples: int, rows_per_sum: int, block_rows: int, start: int
) -> None:
    """Places are looked up in sums at some rows; the oracle sums all tokens of three passes."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(0, 3, num_samples)
    sources[rng.integers(num_samples)] = 1
    tokens = rng.integers(0, 30, num_samples)
    of_source = np.flatnonzero(sources == 1)
    passes = [of_source[np.random.default_rng([6, seed, 1, number]).permutation(len(of_source))] for number in range(3)]
    samples = np.concatenate(passes)
    lengths = np.maximum(tokens[samples], 1)
    first_tokens = np.cumsum(lengths) - lengths
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture_stream, "_ROWS_PER_SUM", rows_per_sum)
        patch.setattr(columns, "BLOCK_ROWS", rows_per_sum * block_rows)
        rows = mixture_stream._rows_of_sources(sources, 3)[1]
        line = mixture_stream._SourceLine(sources, rows, tokens, (seed, 1), SharedArrays(None, ""))
        start %= int(lengths.sum())
        end = int(rng.integers(start, lengths.sum() + 1))
        taken = line.take(start, end)
    assert taken.tolist() == samples[(first_tokens >= start) & (first_tokens < end)].tolist()
    assert line.num_tokens * 3 == lengths.sum()


def test_processes_share_the_orders_of_passes_and_forget_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, lengths, sources = make_stream([{0: 0.2}, {0: 0.5}, {0: 0.3}])
    monkeypatch.setattr("mmtrain.data.index.shared_arrays.MIN_SHARED_ROWS", 1)
    mixture = Mixture(StoredColumn.narrowed("sources", sources), mixture_phases([{0: 0.2}, {0: 0.5}, {0: 0.3}]))

    def start() -> GroupStream:
        grouping = Grouping(SEQ_LEN, 256, GLOBAL_BATCH)
        return GroupStream(lengths, grouping, 3, mixture=mixture, shared=SharedArrays(tmp_path, "index"))

    streams = [start(), start()]
    for step in range(0, 150, 30):
        expected = used(plain, step, 30).tolist()
        assert all(used(stream, step, 30).tolist() == expected for stream in streams)
    assert max(plain.source_passes(150)) > 5
    num_files = len([file for file in tmp_path.iterdir() if file.name != "lock"])
    assert num_files <= 2 * 2 * 3, "of each source two passes: samples, and where they start"
    sent = pickle.loads(pickle.dumps(streams[0]))
    assert used(sent, 150, 5).tolist() == used(plain, 150, 5).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_sources_make_up_their_shares_of_the_tokens(method: GroupingMethod) -> None:
    shares = [0.2, 0.5, 0.3]
    stream, lengths, sources = make_stream([{0: share} for share in shares], method=method)
    samples = used(stream, 0, 120)
    tokens = np.bincount(sources[samples], weights=lengths.tokens[samples])
    assert tokens / tokens.sum() == pytest.approx(shares, abs=0.01)
    groups = stream.groups(0, 120 * GLOBAL_BATCH)
    assert max(int(lengths.tokens[group].sum()) for group in groups) <= SEQ_LEN


def test_shares_of_samples_count_samples() -> None:
    shares = [0.2, 0.5, 0.3]
    stream, _, sources = make_stream([{0: share} for share in shares], unit="samples")
    counts = np.bincount(sources[used(stream, 0, 200)])
    assert counts / counts.sum() == pytest.approx(shares, abs=0.01)


def test_a_schedule_changes_shares_with_its_step() -> None:
    stream, lengths, sources = make_stream([{0: 0.9, 30: 0.1, 50: 0.0}, {0: 0.1, 30: 0.9, 50: 1.0}, {0: 0}])
    for first, count, share in ((0, 30, 0.9), (30, 20, 0.1), (50, 40, 0.0)):
        samples = used(stream, first, count)
        tokens = np.bincount(sources[samples], weights=lengths.tokens[samples], minlength=3)
        assert tokens[0] / tokens.sum() == pytest.approx(share, abs=0.02)
        assert tokens[2] == 0


def test_a_pass_uses_every_sample_of_a_source_once() -> None:
    """Also where the shares change on the way: the line of a source goes on where it was."""
    stream, _, sources = make_stream([{0: 0.5, 7: 0.1}, {0: 0.5, 7: 0.9}], counts=(400, 900))
    samples = used(stream, 0, 60)
    counts = np.bincount(samples, minlength=len(sources))
    for source in (0, 1):
        of_source = counts[sources == source]
        # A handful is left out or taken twice where a block needs one group more or less than was measured.
        assert (of_source.max() - of_source.min() > 1) <= 1
        assert np.sum(np.abs(of_source - np.median(of_source)) > 1) <= 0.01 * len(of_source)


@given(
    st.integers(0, 70),
    st.integers(1, 10),
    st.sampled_from(METHODS),
    st.sampled_from(["tokens", "samples"]),
    st.sampled_from([16, 100, 1000]),
)
def test_any_step_is_found_without_those_before(
    first: int, count: int, method: GroupingMethod, unit: ShareUnit, window: int
) -> None:
    def stream() -> GroupStream:
        shares = [{0: 0.5, 9: 0.2, 33: 0.6}, {0: 0.5, 20: 0.8, 33: 0.4}]
        return make_stream(shares_that_add_up(shares), (60, 30), unit, method, window)[0]

    iterated = contents(stream(), 0, (first + count) * GLOBAL_BATCH)[first * GLOBAL_BATCH :]
    assert contents(stream(), first * GLOBAL_BATCH, count * GLOBAL_BATCH) == iterated
    assert all(iterated), "no group is empty"


def shares_that_add_up(shares: list[dict[int, float]]) -> list[dict[int, float]]:
    """Return schedules made to add up to 1 at each of their steps."""
    phases = mixture_phases(shares)
    return [{phase.first_step: phase.shares[i] for phase in phases} for i in range(len(shares))]


def test_samples_that_fill_a_group_each_are_mixed_too() -> None:
    lengths = SampleLengths(np.full(30, SEQ_LEN), np.ones(30, dtype=np.int64), {})
    mixture = Mixture(np.repeat([0, 1], 15), mixture_phases([{0: 0.75}, {0: 0.25}]))
    stream = GroupStream(lengths, Grouping(SEQ_LEN, 64, 4), 0, mixture=mixture)
    samples = np.concatenate(stream.groups(0, 6 * 64))
    assert np.bincount(samples // 15).tolist() == [6 * 48, 6 * 16]
    assert np.ptp(np.bincount(samples)[:15]) == 1, "in 19.2 passes"


def test_an_epoch_has_the_tokens_of_all_sources() -> None:
    stream, lengths, _ = make_stream([{0: 0.2}, {0: 0.5}, {0: 0.3}])
    epoch = stream.epoch(0, 2)
    assert lengths.tokens[epoch.samples].sum() == pytest.approx(lengths.tokens.sum(), rel=0.1)
    assert stream.epochs_done(2 * stream.groups_per_epoch) == 2


def recipe(folder: Path, sources: list[dict[str, Any]], **data: Any) -> Recipe:
    """Return a recipe of text sources, with as many samples as `count` of each source says."""
    described = []
    for i, source in enumerate(sources):
        path = folder / f"set{i}" / "lengths.csv"
        path.parent.mkdir(exist_ok=True)
        count, text = source.pop("count"), source.pop("text")
        path.write_text(f"count,text\n{count},{text}\n", encoding="utf-8")
        described.append({"path": path, **source})
    return Recipe.model_validate(
        {
            "name": "mixed",
            "model": {"llm": {"layers": 1, "hidden": 32, "heads": 4, "ffn": 64, "vocab": 64}},
            "data": {"sources": described, "seq_len": 1000, **data},
            "train": {"steps": 100, "global_batch": 4, "optimizer": {"lr": 1e-3}},
        }
    )


def test_the_planner_draws_samples_by_their_shares(tmp_path: Path) -> None:
    schedule = {"0": 0.9, "50": 0.7}
    other = {"0": 0.1, "50": 0.3}
    sources = [{"count": 1000, "text": 10, "share": schedule}, {"count": 10, "text": 400, "share": other}]
    settings = recipe(tmp_path, json.loads(json.dumps(sources)))
    index = build_index(settings)
    assert index.sources is not None
    assert index.sources.names == ("set0/lengths.csv", "set1/lengths.csv")
    batches = sample_batches(index.lengths, Grouping.of(settings.data, 4), 0)
    samples = np.concatenate([group for step in batches.groups for group in step])
    tokens = np.bincount(index.sources.numbers[samples], weights=index.lengths.tokens[samples])
    assert tokens[1] / tokens.sum() == pytest.approx(0.2, abs=0.1)
    without = build_index(recipe(tmp_path, [{"count": 1000, "text": 10}, {"count": 10, "text": 400}]))
    assert without.lengths.uses is None
    assert without.fingerprint != index.fingerprint


def test_weights_are_known_to_the_planner_too(tmp_path: Path) -> None:
    index: DataIndex = build_index(
        recipe(tmp_path, [{"count": 2, "text": 10, "weight": 0.5}, {"count": 1, "text": 400}])
    )
    assert index.lengths.uses is not None
    assert index.lengths.uses.tolist() == [0.5, 0.5, 1]


def test_a_share_of_a_source_without_samples_is_an_error(tmp_path: Path) -> None:
    sources = [{"count": 5, "text": 10, "share": 0.5}, {"count": 5, "text": 2000, "share": 0.5}]
    with pytest.raises(DataError, match=r"set1/lengths.csv has share 0.5 and no usable sample"):
        build_index(recipe(tmp_path, sources, max_bad_rate=1.0))


def test_sources_are_summarized_with_their_shares_and_passes(tmp_path: Path) -> None:
    """As predicted before training, and as the steps then turn out."""
    # The third phase, of the same shares, makes blocks end with the run.
    sources = [
        {"count": 300, "text": 10, "share": {"0": 0.9, "50": 0.7, "100": 0.7}},
        {"count": 40, "text": 200, "share": {"0": 0.1, "50": 0.3, "100": 0.3}},
    ]
    settings = recipe(tmp_path, sources)
    index = build_index(settings)
    first, second = summarize_sources(settings, index)
    assert (first.samples, first.tokens, first.token_shares) == (300, 3000, {0: 0.9, 50: 0.7, 100: 0.7})
    samples = np.concatenate(GroupStream.of(settings, index).groups(0, 400))
    counts = np.bincount(samples >= 300)
    assert first.passes == pytest.approx(counts[0] / 300, rel=0.02)
    assert second.passes == pytest.approx(counts[1] / 40, rel=0.02)
    weighted = recipe(tmp_path, [{"count": 30, "text": 10, "weight": 2}, {"count": 3, "text": 200}])
    first, second = summarize_sources(weighted, build_index(weighted))
    assert (first.token_shares, second.token_shares) == ({0: 0.5}, {0: 0.5})
    assert first.passes == 2 * second.passes > 0
