"""From groups to steps: which groups run side by side on the replicas, so that nobody waits long for anybody."""

from itertools import pairwise

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.grouping import SampleGroups
from mmtrain.balance.local_search import CANDIDATES_PER_GROUP, SearchObjective, local_search
from mmtrain.balance.modality_free_steps import form_modality_free_steps

EXTRA_SAMPLES_PER_GROUP = 2  # a group may gain as many samples more than the largest has


def assemble_steps(
    groups: SampleGroups,
    windows: IntArray,
    tokens: IntArray,
    budgets: IntArray,
    even: FloatArray,
    num_replicas: int,
    rounds: int,
    rng: np.random.Generator,
    weights: FloatArray | None = None,
    offset: int = 0,
) -> SampleGroups:
    """Order groups into steps of `num_replicas` whose loads are near equal, exchange samples inside a step, and put
    the steps in random order.

    windows: (W + 1,) group i lies in window w if windows[w] <= i < windows[w + 1]; nothing leaves its window, so that
    the stream stays as random as the shuffle beyond it. tokens: (n, m) sizes, budgets: (m,) what no group may pass.
    even: (q, m): the loads to even out are `tokens @ even.T`: one row a modality whose units have ranks of their own,
    or one row of costs where units share ranks; the coarsest load first. weights: (q,), all 1 by default.
    rounds: exchange rounds a load; 0 leaves every group as it is. offset: so many groups of a step came before these;
    the first ones complete it.

    Returns groups in the order of training, `num_replicas` a step; the last groups may fill only part of a step. A
    step across the border of two windows takes the most average groups of both.
    """
    if rounds:
        groups = form_modality_free_steps(groups, windows, tokens, budgets, tokens @ even[0], num_replicas)
    loads = groups.loads(tokens) @ even.T
    order: list[IntArray] = []
    whole: list[IntArray] = []  # steps inside one window, as places in `order`
    done = 0
    for lo, hi in pairwise(windows.tolist()):
        head, steps, tail = _cut_window(loads, np.arange(lo, hi), -(offset + done) % num_replicas, num_replicas)
        order += [head, rng.permutation(steps).ravel(), tail]
        whole.append(np.arange(steps.size) + done + len(head))
        done += hi - lo
    ordered = groups.reordered(np.concatenate(order) if order else np.empty(0, dtype=np.int64))
    if rounds == 0 or not sum(map(len, whole)):
        return ordered
    aim = SearchObjective(
        np.concatenate([tokens, np.zeros((1, tokens.shape[1]), dtype=np.int64)]).astype(np.float64),
        budgets,
        even,
        np.ones(len(even)) if weights is None else weights,
    )
    return _exchanged(ordered, np.concatenate(whole), num_replicas, aim, rounds * len(even))


def _cut_window(
    loads: FloatArray, here: IntArray, num_head: int, num_replicas: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Split the groups of a window into those that complete the step begun before it, steps (S, N), and a rest.

    Groups equal in the first load form steps among themselves, sorted by the other loads; what remains of each is
    sorted and cut. Head and rest are the groups nearest to the average, since they run beside groups of another window.
    """
    here = here[np.lexsort(loads[here].T[::-1])]
    num_head = min(num_head, len(here))
    num_apart = num_head + (len(here) - num_head) % num_replicas
    mean = np.maximum(loads[here].mean(axis=0), 1e-9) if len(here) else 1.0
    nearest = np.argsort(np.abs(loads[here] / mean - 1).sum(axis=1), kind="stable")[:num_apart]
    apart, here = here[nearest], np.delete(here, nearest)
    _, first, size = np.unique(loads[here, 0], return_index=True, return_counts=True)
    within = np.arange(len(here)) - np.repeat(first, size)
    in_full_steps = within < np.repeat(size // num_replicas * num_replicas, size)
    steps = np.concatenate([here[in_full_steps], here[~in_full_steps]]).reshape(-1, num_replicas)
    return apart[:num_head], steps, apart[num_head:]


def _exchanged(
    groups: SampleGroups, whole: IntArray, num_replicas: int, aim: SearchObjective, rounds: int
) -> SampleGroups:
    """Exchange samples inside the steps, formed by the groups at `whole`, that are less even than their average: most
    steps are even as cut, and time is better spent on those that are not."""
    empty, sizes = len(aim.sizes) - 1, groups.sizes
    steps = whole.reshape(-1, num_replicas)
    loads = np.add.reduceat(aim.sizes[groups.samples], groups.first[:-1], axis=0) @ aim.even.T
    mean = loads[steps].mean(axis=1)
    worth = ((loads[steps].max(axis=1) - mean) / np.where(mean > 0, mean, 1)) @ aim.weights
    steps = steps[worth > worth.mean()]
    num_places = max(int(sizes.max()) + EXTRA_SAMPLES_PER_GROUP, CANDIDATES_PER_GROUP)
    table = np.full((len(groups), num_places), empty, dtype=np.int64)
    table[np.arange(num_places) < sizes[:, None]] = groups.samples
    table[steps] = local_search(table[steps], aim, rounds)
    filled = table != empty
    return SampleGroups(np.concatenate([[0], np.cumsum(filled.sum(axis=1))]), table[filled])
