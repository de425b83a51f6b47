"""Rules of iterative sampling and filtering (ISF): budgets, which groups are full, what is done with the rest."""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from mmtrain.balance.batch_meta import IntArray

TokenBudget = Literal["seq_len", "longest"]
EncoderBudget = Literal["tokens", "items"]
Remainder = Literal["keep", "next_epoch"]


class IsfOptions(Protocol):
    """The settings of a recipe's `data.isf`."""

    @property
    def token_budget(self) -> TokenBudget:
        """What bounds the LLM tokens of a group."""

    @property
    def encoder_budget(self) -> EncoderBudget:
        """What an encoder's budget counts."""

    @property
    def rounds(self) -> int:
        """How often the samples of groups that are not full are shuffled again."""

    @property
    def slack(self) -> float:
        """The share of the LLM's budget that a full group may lack."""

    @property
    def encoder_slack(self) -> float | None:
        """The same for encoders; None: `slack`."""

    @property
    def remainder(self) -> Remainder:
        """What is done with the samples that no full group holds after all rounds."""


@dataclass(frozen=True)
class IsfRules:
    """The rules of OmniBal (arXiv 2407.20761), but for a slack that is a share and the same for every budget."""

    token_budget: TokenBudget = "seq_len"  # OmniBal: the longest sample
    encoder_budget: EncoderBudget = "tokens"
    rounds: int = 10
    slack: float = 1 / 32  # OmniBal: 128 tokens, of a budget of 4,096
    encoder_slack: float | None = None  # as `slack`; OmniBal: 0
    remainder: Remainder = "keep"

    @classmethod
    def of(cls, settings: IsfOptions) -> "IsfRules":
        """Return the rules that a recipe's settings give."""
        return cls(
            token_budget=settings.token_budget,
            encoder_budget=settings.encoder_budget,
            rounds=settings.rounds,
            slack=settings.slack,
            encoder_slack=settings.encoder_slack,
            remainder=settings.remainder,
        )

    def least_loads(self, budgets: IntArray) -> IntArray:
        """Return (m,) the load under each budget (m,), the LLM's first, from which a group is full."""
        shares = np.full(len(budgets), self.slack if self.encoder_slack is None else self.encoder_slack)
        shares[0] = self.slack
        slack: IntArray = np.floor(budgets * shares).astype(np.int64)
        return budgets - slack
