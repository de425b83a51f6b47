"""The audio encoder's embedding layer and context: two convolutions over log-mel frames (Whisper, arXiv 2212.04356).

The clips of one microbatch are packed one after another, frame by frame. A convolution sees zeros beyond both ends of
a clip, never the neighboring clip, so packing does not change a clip's result. A clip with an odd number of frames has
one to look at: the convolutions see the last frame, and no token stands for it; or, where the settings say so, the last
token stands for that frame alone. A clip may be cut into chunks, each of which is then computed like a clip of its own,
up to the projector.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.index_tables import HostTables, brought_or_computed
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.elementwise import activate
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.host_offload import OffloadedBlocks
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe.settings.audio_settings import AudioSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

IntArray = npt.NDArray[np.int64]

_KERNEL_SIZE = 3
_MAX_WAVELENGTH = 10_000  # of the sinusoidal positions, in units of the shortest one (Whisper)


@dataclass(frozen=True)
class AudioContext:
    """What the layers of an audio stage need to know about one microbatch of clips."""

    inputs: EncoderInput  # rows are log-mel frames, in one column
    device: torch.device
    chunk: int = 0  # tokens that attend to each other, if clips are cut into chunks; else 0
    partial_cells: int = 0  # frames that may be missing in the last token of a clip
    frames_per_token: int = 2
    offloaded: OffloadedBlocks = field(default_factory=OffloadedBlocks, compare=False)

    @cached_property
    def item_lengths(self) -> tuple[int, ...]:
        """See `EncoderContext`: one token for two or eight frames of a clip."""
        return tuple((frames + self.partial_cells) // self.frames_per_token for frames in self.inputs.rows)

    @property
    def num_tokens(self) -> int:
        """See `EncoderContext`."""
        return self._item_layout.num_tokens

    def block_packing(self, layer: LayerShape) -> PackedSequences:
        """Each clip is a sequence, or each chunk of a clip is one."""
        keys = self.tables(self.index_tables).get("token_keys")
        return PackedSequences(self.block_layout(layer), token_keys=keys)

    def block_layout(self, layer: LayerShape) -> SequenceLayout:
        """See `EncoderContext`."""
        return self._chunk_layout if layer.attention.chunk else self._item_layout

    @cached_property
    def _item_layout(self) -> SequenceLayout:
        return SequenceLayout(self.item_lengths, (), "items", self.inputs.tables)

    @cached_property
    def _chunk_layout(self) -> SequenceLayout:
        return SequenceLayout(self._chunk_lengths, (), "chunks", self.inputs.tables)

    @property
    def _chunk_lengths(self) -> tuple[int, ...]:
        return tuple(cut(self.item_lengths, self.chunk))

    def positions(self) -> IntArray:
        """Return the position of each token in its clip, or in its chunk: (T,)."""
        lengths = np.asarray(self._chunk_lengths if self.chunk else self.item_lengths, dtype=np.int64)
        return ranges(np.zeros_like(lengths), lengths)

    def token_frames(self) -> IntArray:
        """Return the frame in the middle of each token's window, every second frame of a clip: (T,)."""
        frames = np.asarray(self.inputs.rows, dtype=np.int64)
        starts = np.cumsum(frames) - frames
        return ranges(starts, np.asarray(self.item_lengths, dtype=np.int64), step=2)

    def frame_bounds(self) -> tuple[IntArray, IntArray]:
        """Return the first and the last frame of all that convolutions see at once: of clips, or of chunks."""
        pieces = cut(self.inputs.rows, 2 * self.chunk) if self.chunk else self.inputs.rows
        lengths = np.asarray([frames for frames in pieces if frames], dtype=np.int64)
        ends = np.cumsum(lengths)
        return ends - lengths, ends - 1

    def token_order(self, tokens_per_feature: int) -> IntArray | None:
        """Leave out the tokens at the end of a clip that fill no feature; see `EncoderContext.token_order`."""
        lengths = np.asarray(self.item_lengths, dtype=np.int64)
        if not (lengths % tokens_per_feature).any():
            return None
        num_used = lengths - lengths % tokens_per_feature
        starts = np.cumsum(lengths) - lengths
        return ranges(starts, num_used)

    def tables(self, compute: Callable[[], HostTables]) -> Mapping[str, Tensor]:
        """See `EncoderContext.tables`."""
        return brought_or_computed(self.inputs.tables, compute, self.device)

    def index_tables(self) -> HostTables:
        """See `EncoderContext`: the keys of tokens."""
        return self.inputs.token_keys(self.item_lengths)


class AudioEmbed(nn.Module):
    """Two convolutions with activations, the second of which halves the number of frames, plus positions.

    It is small and its widths need not divide by the TP degree, so every tensor-parallel rank holds all of it. The
    weights are those of a Conv1d with (channel, tap) flattened: a convolution over the pack is a GEMM over three
    shifted copies side by side.
    """

    def __init__(self, settings: AudioSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.longest_clip_frames = settings.longest_clip_frames
        self.activation = settings.activation
        conv1_width, conv2_width = _KERNEL_SIZE * shape.media.mel_bins, _KERNEL_SIZE * shape.hidden
        self.conv1 = nn.Linear(conv1_width, shape.hidden, bias=shape.linear_bias, dtype=factory.dtype)
        self.conv2 = nn.Linear(conv2_width, shape.hidden, bias=shape.linear_bias, dtype=factory.dtype)
        self.positions: nn.Parameter | None = None
        if shape.media.position_rows:
            self.positions = nn.Parameter(torch.empty(shape.media.position_rows, shape.hidden, dtype=factory.dtype))

    def forward(self, hidden: None, context: AudioContext) -> Tensor:
        """Embed log-mel frames (N, mel_bins) to tokens (N / 2, hidden)."""
        mels = context.inputs.numbers(self.conv1.weight.dtype)
        assert mels is not None, "the first audio stage needs log-mel frames"
        self._check_lengths(context.inputs.rows)
        tables = context.tables(partial(self.index_tables, context))
        frames = activate(self.conv1(_convolution_input(mels, tables)), self.activation)
        tokens = activate(self.conv2(_convolution_input(frames, tables, tables["token_frames"])), self.activation)
        if self.positions is not None:
            return tokens + F.embedding(tables["token_positions"], self.positions)
        num_positions = context.chunk or max(context.item_lengths, default=0)
        table = sinusoids(num_positions, tokens.shape[1], context.device)
        return tokens + table.to(tokens.dtype).index_select(0, tables["token_positions"])

    def index_tables(self, context: AudioContext) -> HostTables:
        """See `TableUser`: which frames the convolutions see, and where tokens find their positions."""
        self._check_lengths(context.inputs.rows)
        first_frames, last_frames = context.frame_bounds()
        return {
            "first_frames": first_frames,
            "last_frames": last_frames,
            "token_frames": context.token_frames(),
            "token_positions": context.positions(),
        }

    def _check_lengths(self, frames: tuple[int, ...]) -> None:
        longest, allowed = max(frames, default=0), self.longest_clip_frames
        if allowed is not None and longest > allowed:
            raise DataError(
                f"a clip is {longest} log-mel frames long, but the encoder's `max_frames` is {allowed}: "
                "raise max_frames, or lower data.audio.max_seconds"
            )


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """Return fixed positions (length, width): sines, then cosines, of wavelengths from 2 pi to 10,000 x 2 pi."""
    half = width // 2
    frequencies = torch.exp(-math.log(_MAX_WAVELENGTH) / max(half - 1, 1) * torch.arange(half, device=device))
    angles = torch.arange(length, device=device)[:, None] * frequencies[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _convolution_input(frames: Tensor, tables: Mapping[str, Tensor], centers: Tensor | None = None) -> Tensor:
    """Join each frame (of `centers`, if given) with those before and after it in its clip: (N, C) -> (M, C * 3).

    Beyond the ends of a clip, or of a chunk, are zeros. Features are ordered (channel, tap) like a flattened Conv1d
    weight.
    """
    zeros = frames.new_zeros(1, frames.shape[1])
    previous = torch.cat((zeros, frames))[:-1].index_fill(0, tables["first_frames"], 0)
    following = torch.cat((frames, zeros))[1:].index_fill(0, tables["last_frames"], 0)
    taps = [previous, frames, following]
    if centers is not None:
        taps = [tap.index_select(0, centers) for tap in taps]
    return torch.stack(taps, dim=2).flatten(1)


def cut(lengths: Iterable[int], largest: int) -> Iterator[int]:
    """Cut sequences into pieces of `largest`, of which the last may be shorter; yield the lengths of the pieces."""
    for length in lengths:
        for start in range(0, length, largest):
            yield min(largest, length - start)


def ranges(starts: IntArray, lengths: IntArray, step: int = 1) -> IntArray:
    """Return start, start + step, ... of each length, one range after another."""
    firsts = np.cumsum(lengths) - lengths
    within: IntArray = np.arange(lengths.sum()) - np.repeat(firsts, lengths)
    return np.repeat(starts, lengths) + within * step
