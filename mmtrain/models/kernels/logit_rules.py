"""Change logits before the likeliest token is picked, as the settings of a published model say."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogitRules:
    """What holds for the next tokens of S sequences."""

    rows: Tensor  # (N,) int64, a sequence
    ids: Tensor  # (N,) int64, a token that it holds; each pair once
    penalty: float  # by which positive logits of these are divided, and negative ones multiplied
    suppressed: Tensor  # (M,) int64, tokens that are never picked

    def apply(self, logits: Tensor, first_id: int) -> Tensor:
        """Return the logits (T, n) of the ids from `first_id` on, changed; those of other ids are on other ranks."""
        changed = logits.clone()
        is_here = (self.ids >= first_id) & (self.ids < first_id + logits.shape[1])
        rows, ids = self.rows[is_here], self.ids[is_here] - first_id
        seen = changed[rows, ids]
        changed[rows, ids] = torch.where(seen < 0, seen * self.penalty, seen / self.penalty)
        suppressed = self.suppressed - first_id
        changed[:, suppressed[(suppressed >= 0) & (suppressed < logits.shape[1])]] = float("-inf")
        return changed
