"""Our attention over packed samples as an implementation of attention that the models of `transformers` call.

A model passes it queries, keys and values of one row of tokens. Where samples start and end it cannot pass: that is set
around each forward by `attending`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

PACKED_ATTENTION = "mmtrain_packed"  # the name under which `transformers` finds it


class Attend(Protocol):
    """Attends inside the samples of a microbatch."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int,
        scale: float | None,
        score_cap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend: q (T, heads, d), k and v (T, kv_heads, d) -> (T, heads, d).

        window: tokens that a token sees, itself and earlier ones; 0: all of its sample. score_cap: scores s become
        `score_cap` tanh(s / `score_cap`). sinks: (heads,) scores of a key that no token has.
        """


_ATTEND: ContextVar[Attend | None] = ContextVar("attend", default=None)


@dataclass(frozen=True)
class PackedMask:
    """What stands for a mask: the layers with this one see `window` tokens, 0: all earlier ones of their sample."""

    window: int


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Let all layers with `PACKED_ATTENTION` attend by `attend`, in this thread."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def register_packed_attention() -> None:
    """Make `PACKED_ATTENTION` known to `transformers`; a second call changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, _attend_packed)
    AttentionMaskInterface.register(PACKED_ATTENTION, _packed_mask)


def _packed_mask(*_: Any, local_size: int | None = None, **__: Any) -> PackedMask:
    """Return what layers get as their mask."""
    return PackedMask(local_size or 0)


def _attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in one row of packed samples: (1, heads, T, d) -> (1, T, heads, d), as `transformers` calls it.

    options: what single models pass beside that: `sliding_window`, `softcap` on scores, `s_aux` for sinks.
    """
    attend = _ATTEND.get()
    assert attend is not None, f"{type(module).__name__} runs outside of `attending`"
    window = options.get("sliding_window") or 0
    if isinstance(attention_mask, PackedMask):
        window = attention_mask.window
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cap, sinks = options.get("softcap"), options.get("s_aux")
    out = attend(q, k, v, window=window, scale=scaling, score_cap=cap, sinks=sinks)
    return out[None], None
