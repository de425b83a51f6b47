"""Long samples among short ones: the images of a long one are shared out over the ranks that hold its sequence."""

import heapq

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.balance.rearrangement import Rearrangement, slots


def split_long_samples(
    sample: IntArray, tokens: IntArray, owner: IntArray, num_ranks: int, longest: int
) -> Rearrangement:
    """Share out the items of long samples over context-parallel ranks; those of short samples stay where they are.

    sample: (n,) which sample an item belongs to, tokens: (n,) what it costs the encoder, owner: (n,) the rank that
    would encode it alone. Samples with more than `longest` tokens of items together are long: a rank that encoded all
    of one would keep the others waiting, whatever else they were given. Their items go, longest first, to the rank
    with the least (at most 4/3 of the best possible maximum above the short ones). The features are gathered for the
    LLM by the inverse. (OmniBal, arXiv 2407.20761, long context.)
    """
    weight = np.bincount(sample, weights=tokens)[sample] if len(sample) else np.empty(0)
    is_long = weight > longest
    rank = owner.copy()
    loads = np.bincount(owner[~is_long], weights=tokens[~is_long], minlength=num_ranks)
    least_first = [(float(load), r) for r, load in enumerate(loads)]
    heapq.heapify(least_first)
    (items,) = np.nonzero(is_long)
    for i in items[np.argsort(-tokens[items], kind="stable")].tolist():
        load, rank[i] = least_first[0]
        heapq.heapreplace(least_first, (load + float(tokens[i]), int(rank[i])))
    return Rearrangement(owner, rank, slots(rank))
