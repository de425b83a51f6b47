"""Even out many groups at once: pair large groups with small ones, and make the best exchange of every pair.

A round of `local_search` improves one pair of a row, which is slow where most groups are uneven. A round here improves
half as many pairs as there are groups, towards equal loads by least squares; local search then lowers the largest load.
"""

import numpy as np

from mmtrain.balance.batch_meta import FloatArray, IntArray
from mmtrain.balance.local_search import OFFERS, SearchObjective, offered_samples

MIN_GAIN = 1e-9  # of squared shares of the mean load: less is rounding


def exchange_in_pairs(
    members: IntArray, objective: SearchObjective, rounds: int, targets: FloatArray | None = None
) -> IntArray:
    """Bring the groups of each row nearer to their target loads by exchanging samples between pairs of groups.

    members: (S, N, K) sample numbers of the N groups of S rows, as `local_search` takes them. Returns such an array.
    targets: (S, N, q) load of each group; by default the mean of its row. The weighted sum of squared deviations from
    the targets, in shares of the row's mean, never increases; no exchange passes a budget or empties a group. It uses
    no random numbers.

    Each round sorts the groups of a row by what one of their loads exceeds its target by, and pairs the first with the
    last, the second with the last but one, and so on.
    """
    num_rows, num_groups, num_places = members.shape
    if num_rows == 0 or num_groups < 2:
        return members
    empty = len(objective.sizes) - 1
    loads_of_samples = objective.sizes @ objective.load_matrix.T
    used = objective.sizes[members].sum(axis=2)
    mean = (used @ objective.load_matrix.T).mean(axis=1)
    scale = np.divide(np.sqrt(objective.weights), mean, out=np.zeros_like(mean), where=mean > 0)  # (S, q)
    num_loads = loads_of_samples.shape[1]
    if targets is None:
        targets = np.broadcast_to(mean[:, None], (num_rows, num_groups, num_loads))
    targets = targets.reshape(-1, num_loads)
    num_pairs = num_groups // 2
    members = members.reshape(-1, num_places).copy()
    used = used.reshape(-1, used.shape[-1])
    first_group = np.arange(num_rows)[:, None] * num_groups
    row_of_pair = np.repeat(np.arange(num_rows), num_pairs)
    for number in range(rounds):
        turn, load = divmod(number, num_loads)
        excess = used @ objective.load_matrix.T - targets
        ascending = np.argsort(excess[:, load].reshape(num_rows, num_groups), axis=1, kind="stable") + first_group
        low = np.roll(ascending[:, :num_pairs], turn, axis=1).ravel()
        high = ascending[:, ::-1][:, :num_pairs].ravel()
        offers = [offered_samples(members[groups], empty, turn) for groups in (high, low)]
        gain, best = _best_exchanges(
            offers,
            (used[high], used[low]),
            (excess[high] - excess[low]) * scale[row_of_pair],
            loads_of_samples,
            scale[row_of_pair],
            objective,
        )
        is_better = gain > MIN_GAIN
        rows = np.arange(len(best))
        leaving = offers[0][rows, best // len(OFFERS)]
        entering = offers[1][rows, best % len(OFFERS)]
        _apply(members, used, (high, low), (leaving, entering), is_better, objective.sizes)
    return members.reshape(num_rows, num_groups, num_places)


def _best_exchanges(
    offers: list[IntArray],
    used: tuple[FloatArray, FloatArray],
    difference: FloatArray,
    loads_of_samples: FloatArray,
    scale: FloatArray,
    objective: SearchObjective,
) -> tuple[FloatArray, IntArray]:
    """Return (P,) by how much the best exchange of each pair lowers its squares, and the number of that exchange.

    offers: two arrays (P, O, 2) of samples. Giving a and taking b changes the squares by 2 s (s - d) with s = a - b and
    d the `difference` (P, q) of the two groups' excesses: a sum of a part of a, a part of b, and a product of both.
    """
    given, taken = (loads_of_samples[offer].sum(axis=2) * scale[:, None] for offer in offers)  # (P, O, q)
    difference = difference[:, None]
    of_given = (given * (given - difference)).sum(axis=2)
    of_taken = (taken * (taken + difference)).sum(axis=2)
    change = of_given[:, :, None] + of_taken[:, None] - 2 * given @ taken.transpose(0, 2, 1)
    for j, budget in enumerate(objective.budgets):
        sizes = [objective.sizes[:, j][offer].sum(axis=2) for offer in offers]
        largest = max(float((use[:, j] + size.max(axis=1)).max()) for use, size in zip(used, sizes[::-1], strict=True))
        if largest <= budget:
            continue
        moved = sizes[0][:, :, None] - sizes[1][:, None]
        room_high, room_low = (budget - use[:, j, None, None] for use in used)
        change[(moved > room_low) | (-moved > room_high)] = np.inf
    flat = change.reshape(len(change), -1)
    best = flat.argmin(axis=1)
    return -flat[np.arange(len(flat)), best], best


def _apply(
    members: IntArray,
    used: FloatArray,
    pairs: tuple[IntArray, IntArray],
    moved: tuple[IntArray, IntArray],
    is_better: np.ndarray,
    sizes: FloatArray,
) -> None:
    """Exchange the samples `moved` (P, 2) each way in the pairs where `is_better`, unless that empties a group."""
    empty, num_places = len(sizes) - 1, members.shape[1]
    after = []
    possible = is_better.copy()
    for groups, leaving, entering in zip(pairs, moved, moved[::-1], strict=True):
        before = members[groups]
        is_leaving = (before[:, :, None] == leaving[:, None]).any(axis=2)
        together = np.concatenate([np.where(is_leaving, empty, before), entering], axis=1)
        is_empty = together == empty
        num_members = (~is_empty).sum(axis=1)
        possible &= (num_members > 0) & (num_members <= num_places)
        in_front = np.argsort(is_empty, axis=1, kind="stable")[:, :num_places]
        after.append(np.take_along_axis(together, in_front, axis=1))
    for groups, new_members in zip(pairs, after, strict=True):
        members[groups[possible]] = new_members[possible]
        used[groups[possible]] = sizes[new_members[possible]].sum(axis=1)
