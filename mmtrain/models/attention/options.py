"""How the tokens of a sequence attend to each other, and which code computes it."""

from dataclasses import dataclass
from typing import Literal

AttentionBackend = Literal["flash_attn_3", "flash_attn_4", "flash_attn", "varlen", "sdpa", "reference"]


@dataclass(frozen=True)
class AttentionOptions:
    """How the tokens of a sequence attend to each other."""

    backend: AttentionBackend
    causal: bool  # to themselves and to earlier tokens only
    window: int = 0  # causal: to themselves and to the `window` - 1 tokens before; 0: to all earlier ones
    scale: float | None = None  # factor on scores; None: 1 / sqrt(d)
