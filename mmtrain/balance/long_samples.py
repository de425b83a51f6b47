"""Split the items of long samples over context-parallel ranks (OmniBal, arXiv 2407.20761, long context)."""

import heapq

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.rearrangement import Rearrangement, slots


def split_long_samples(
    sample: IntArray, tokens: IntArray, owner: IntArray, num_ranks: int, max_tokens: int
) -> Rearrangement:
    """Spread the items of long samples over context-parallel ranks; items of short samples stay where they are.

    sample: (n,) which sample an item belongs to. tokens: (n,) what the item costs the encoder. owner: (n,) the rank
    that would encode it alone. Samples whose items have more than `max_tokens` together are long: a rank that encoded
    all of one would keep the others waiting, whatever they were given. Their items go, longest first, to the rank with
    the least load, which is at most 4/3 of the best possible maximum above the short ones. The features are gathered
    for the LLM by the inverse rearrangement. No plan uses this yet; context parallelism will.
    """
    sample_tokens = np.bincount(sample, weights=tokens)[sample] if len(sample) else np.empty(0)
    is_long = sample_tokens > max_tokens
    rank = owner.copy()
    loads = np.bincount(owner[~is_long], weights=tokens[~is_long], minlength=num_ranks)
    least_first = [(float(load), r) for r, load in enumerate(loads)]
    heapq.heapify(least_first)
    long_items = np.flatnonzero(is_long)
    for item in long_items[np.argsort(-tokens[long_items], kind="stable")].tolist():
        load, rank[item] = least_first[0]
        heapq.heapreplace(least_first, (load + float(tokens[item]), int(rank[item])))
    return Rearrangement(owner, rank, slots(rank))
