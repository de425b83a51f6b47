"""Features of encoders that ranks share by context parallelism: runs of them, compared with every single feature."""

import numpy as np
import pytest

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.program.ir.context_loads import (
    feature_runs,
    num_features_of_samples,
    owners_of_features,
    ranks_of_whole,
    split_microbatches,
)
from mmtrain.program.ir.graph import UnitMesh
from tests.tiers import quick_and_long

NUM_MICROBATCHES = 2


def batch(seed: int) -> BatchMeta:
    """Draw samples of two replicas with none to four items each; some items have no features."""
    rng = np.random.default_rng(seed)
    slots = np.sort(rng.integers(0, 2 * NUM_MICROBATCHES, 12))
    sample = rng.permutation(np.repeat(np.arange(len(slots)), rng.integers(0, 5, len(slots))))
    position = np.empty_like(sample)
    for row in range(len(slots)):
        position[sample == row] = rng.permutation((sample == row).sum())
    features = rng.integers(0, 40, len(sample))
    tokens = rng.integers(1, 400, len(slots)) * 100 + np.bincount(sample, features, len(slots)).astype(np.int64)
    nothing = np.zeros_like(sample)
    items = ItemTable(sample, position, nothing, nothing, features, features, nothing, nothing)
    replica, index = np.divmod(slots, NUM_MICROBATCHES)
    return BatchMeta(0, 0, np.arange(len(slots)), tokens, tokens, replica, index, {"vision": items})


@pytest.mark.parametrize("seed", quick_and_long(range(20), every=4))
@pytest.mark.parametrize("cp", [2, 3, 8])
def test_runs_of_features_are_those_of_every_feature(seed: int, cp: int) -> None:
    meta = batch(seed)
    items = meta.items["vision"]
    mesh = UnitMesh("llm", 1, 1, 2, tuple(range(2 * cp)), NUM_MICROBATCHES, cp=cp)
    splits = split_microbatches(mesh, meta)
    ranks = np.zeros(len(meta.tokens), dtype=np.int64)
    for (replica, index), split in splits.items():
        ranks[meta.microbatch(replica, index)] = ranks_of_whole(split)
    owners = owners_of_features(num_features_of_samples(items, len(ranks)), ranks, cp)
    by_sample = np.lexsort((items.position, items.sample))
    item_of_feature = np.repeat(by_sample, items.features[by_sample])
    sample = items.sample[item_of_feature]
    slots = (meta.replica[sample] * cp + owners) * NUM_MICROBATCHES + meta.index[sample]
    expected = sorted(zip(item_of_feature.tolist(), slots.tolist(), strict=True))
    item, slot, length = feature_runs(mesh, meta, items, splits)
    assert (length > 0).all()
    runs = zip(item.tolist(), slot.tolist(), length.tolist(), strict=True)
    assert [(i, s) for i, s, count in runs for _ in range(count)] == expected
    assert len(set(zip(item.tolist(), slot.tolist(), strict=True))) == len(item)
