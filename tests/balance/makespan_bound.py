"""A lower bound of how long a pipeline takes in any order, to measure orders against."""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray


def makespan_lower_bound(forward: FloatArray, backward: FloatArray) -> float:
    """Return seconds that no order of a pipeline goes below; forward, backward: (p, l).

    That is a stage's whole work, what must precede it on the stages before, and what must follow it there.
    """
    work = (forward + backward).sum(axis=1)
    before = np.concatenate([[0.0], np.cumsum(forward, axis=0).min(axis=1)[:-1]])
    after = np.concatenate([[0.0], np.cumsum(backward, axis=0).min(axis=1)[:-1]])
    return float((work + before + after).max())
