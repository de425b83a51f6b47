"""What a stage computes on, beside the hidden states it receives: one microbatch of one unit.

Lengths are known on every rank of the unit; payload (patches, ids, labels) only where the stage needs it.
"""

from dataclasses import dataclass, field

from torch import Tensor

from mmtrain.models.kv_cache import KVCache


@dataclass(frozen=True)
class VisionInput:
    """One encoder microbatch of I images with N patches in all, packed one after another."""

    rows: tuple[int, ...]  # (I,) patch rows of each image
    cols: tuple[int, ...]  # (I,)
    patches: Tensor | None = None  # (N, 3 * patch * patch), row by row, each patch as (channel, y, x); first stage only


@dataclass(frozen=True)
class AudioInput:
    """One encoder microbatch of I clips with N log-mel frames in all, packed one after another."""

    frames: tuple[int, ...]  # (I,) frames of each clip, even
    mels: Tensor | None = None  # (N, mel_bins); first stage only


@dataclass(frozen=True)
class TextInput:
    """One LLM microbatch of S sequences with T tokens in all, packed one after another."""

    lengths: tuple[int, ...]  # (S,) LLM tokens of each sequence
    ids: Tensor | None = None  # (T,) int64; stages with embedding
    labels: Tensor | None = None  # (T,) int64, the token to predict at each place, -100 where none; stages with head
    feature_positions: dict[str, Tensor] = field(
        default_factory=dict
    )  # encoder unit -> (F,) places in [0, T) its rows go to
    kv_cache: KVCache | None = None  # where an answer is written: the sequences' earlier tokens, and room for these


UnitInput = VisionInput | AudioInput | TextInput
