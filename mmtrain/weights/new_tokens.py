"""The weights of tokens that a model did not have before: the mean of the rows of its own tokens.

So a new token's logit is the mean of all logits, and its probability at most the mean of theirs: n old and k new tokens
raise the loss of any text by at most log(1 + k / n). Random rows may take all of the probability of a text that the
model knew (Hewitt, "Initializing New Word Embeddings for Pretrained Language Models", 2021). The mean is also the same
on every rank, whatever the plan. New tokens whose rows are equal part with the first step, which has other gradients
for each.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_ELEMENTS_PER_READ = 16 << 20  # 64 MB in fp32: what a rank holds beside its parameters


def mean_row(pieces: Iterable["torch.Tensor"]) -> "torch.Tensor":
    """Return the mean over the rows of a matrix that comes in pieces (rows, width): (width,), in fp64.

    Sums in fp64 differ too little between plans to be seen after rounding.
    """
    import torch

    total: torch.Tensor | None = None
    num_rows = 0
    for piece in pieces:
        piece_sum = piece.sum(0, dtype=torch.float64)
        total = piece_sum if total is None else total + piece_sum
        num_rows += len(piece)
    assert total is not None, "a vocabulary has tokens"
    return total / num_rows
