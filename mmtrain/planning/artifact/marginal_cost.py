"""Approximate the seconds of a load by seconds per token and per pair of tokens, to balance many loads quickly."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mmtrain.costs import TokenLoad


@dataclass(frozen=True)
class MarginalCost:
    """Seconds linear * n + quadratic * s of n tokens in sequences with s = sum of squared lengths."""

    linear: float = 0.0  # seconds per token
    quadratic: float = 0.0  # seconds per pair of tokens in one sequence

    def __add__(self, other: "MarginalCost") -> "MarginalCost":
        return MarginalCost(self.linear + other.linear, self.quadratic + other.quadratic)


def marginal_cost(seconds: Callable[[TokenLoad], float], load: TokenLoad) -> MarginalCost:
    """Return what one more token, and one more pair of tokens in a sequence, cost on average near a load.

    Where the time does not grow with tokens, because reading the weights dominates, the mean seconds of a token take
    the place of the marginal ones.
    """
    if load.tokens < 2:
        return MarginalCost()

    def scaled(tokens: float, pairs: float) -> float:
        num_targets = None if load.targets is None else round(load.targets * tokens)
        tokens_and_pairs = round(load.tokens * tokens), round(load.sum_sq * pairs)
        return seconds(TokenLoad(*tokens_and_pairs, load.max_len, load.num_sequences, num_targets))

    linear = (scaled(1.5, 1) - scaled(0.5, 1)) / load.tokens
    quadratic = max((scaled(1, 1.5) - scaled(1, 0.5)) / max(load.sum_sq, 1), 0.0)
    if linear <= 0:
        linear = max(scaled(1, 1) - quadratic * load.sum_sq, 0.0) / load.tokens
    return MarginalCost(linear, quadratic)


def average_cost(seconds: Callable[[TokenLoad], float], load: TokenLoad) -> MarginalCost:
    """Return the whole time of a load, divided between its pairs (what doubling them adds) and its tokens (the rest).

    It is exact at that load, fixed costs included, while `marginal_cost` says what another token would add.
    """
    once, with_twice_the_pairs = seconds(load), seconds(replace(load, sum_sq=2 * load.sum_sq))
    return MarginalCost((2 * once - with_twice_the_pairs) / load.tokens, (with_twice_the_pairs - once) / load.sum_sq)
