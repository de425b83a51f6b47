"""What the samples of a step cost under its targets."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mmtrain.balance import BalancedLoad, ItemLengths, SampleLengths, SequenceCost, StepTargets
from mmtrain.balance.step_targets import SampleWork


def make_lengths(rng: np.random.Generator, n: int) -> SampleLengths:
    counts = rng.integers(0, 4, n)
    sizes = rng.integers(1, 30, counts.sum())
    first = np.concatenate([[0], np.cumsum(counts)])
    tokens = rng.integers(1, 99, n)
    return SampleLengths(tokens, tokens, {"vision": ItemLengths(first, sizes, np.ones_like(sizes), sizes, sizes)})


@given(st.integers(0, 10_000), st.integers(1, 12))
def test_sample_work_applies_costs_to_samples_and_their_items(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = make_lengths(rng, n)
    items = lengths.items["vision"]
    samples = rng.integers(0, n, 2 * n)  # some twice, some never
    llm, vision = SequenceCost(3, 2), SequenceCost(7, 1)
    targets = StepTargets((BalancedLoad({"vision": vision}), BalancedLoad({"llm": llm, "vision": vision})))
    loads = SampleWork(lengths, samples).loads(targets)
    for sample, (alone, summed) in zip(samples.tolist(), loads.tolist(), strict=True):
        sizes = items.tokens[items.first[sample] : items.first[sample + 1]].tolist()
        assert alone == sum(7 * size + size**2 for size in sizes)
        text = int(lengths.tokens[sample])
        assert summed == alone + 3 * text + 2 * text**2
