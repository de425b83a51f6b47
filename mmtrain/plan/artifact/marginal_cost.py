"""What a load takes as so much for every token and every pair of tokens: for sorting and evening out many loads."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from mmtrain.costs import TokenLoad


@dataclass(frozen=True)
class MarginalCost:
    """Seconds of n tokens in sequences whose squares sum to s, near a typical load: linear * n + quadratic * s."""

    linear: float = 0.0
    quadratic: float = 0.0

    def __add__(self, other: "MarginalCost") -> "MarginalCost":
        return MarginalCost(self.linear + other.linear, self.quadratic + other.quadratic)


def marginal_cost(seconds: Callable[[TokenLoad], float], at: TokenLoad) -> MarginalCost:
    """What another token, and another pair of tokens in one sequence, cost on average near the load `at`.

    Where the time does not grow (the weights are read, however few the tokens), the mean takes the place of the slope.
    """
    if at.tokens < 2:
        return MarginalCost()

    def probe(tokens: float, pairs: float) -> float:
        return seconds(TokenLoad(round(at.tokens * tokens), round(at.sum_sq * pairs), at.max_len, at.num_sequences))

    linear = (probe(1.5, 1) - probe(0.5, 1)) / at.tokens
    quadratic = max((probe(1, 1.5) - probe(1, 0.5)) / max(at.sum_sq, 1), 0.0)
    if linear <= 0:
        linear = max(probe(1, 1) - quadratic * at.sum_sq, 0.0) / at.tokens
    return MarginalCost(linear, quadratic)


def average_cost(seconds: Callable[[TokenLoad], float], at: TokenLoad) -> MarginalCost:
    """All that the load `at` takes, shared out: what doubling its pairs adds to them, the rest to its tokens.

    Exact at that load, fixed costs included, where `marginal_cost` says what another token would add to it.
    """
    one, two = seconds(at), seconds(replace(at, sum_sq=2 * at.sum_sq))
    return MarginalCost((2 * one - two) / at.tokens, (two - one) / at.sum_sq)
