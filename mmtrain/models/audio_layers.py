"""The audio unit's first layer: two convolutions over log-mel frames (Whisper, arXiv 2212.04356).

Clips of one microbatch lie packed one after another, frame by frame. A convolution sees zeros beyond both ends of a
clip, never its neighbour, so packing computes what separate clips would. Every clip has an even number of frames:
then the second convolution's stride of 2 falls on the same frames in the pack as in each clip alone.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.attention import PackedSequences
from mmtrain.models.model_shape import LayerShape
from mmtrain.models.stage_inputs import AudioInput
from mmtrain.recipe.model_settings import AudioSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

IntArray = npt.NDArray[np.int64]
_TAPS = 3
_LONGEST_WAVE = 10_000


@dataclass(frozen=True)
class AudioContext:
    """One microbatch of clips as every layer of an audio stage sees it."""

    inputs: AudioInput
    device: torch.device

    @cached_property
    def packing(self) -> PackedSequences:
        """Each clip is a sequence of its own, of one token for two frames."""
        return PackedSequences(tuple(n // 2 for n in self.inputs.frames))

    @cached_property
    def positions(self) -> Tensor:
        """(T,) place of each token in its clip."""
        lengths = np.asarray(self.packing.lengths, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        return torch.from_numpy(np.arange(lengths.sum()) - np.repeat(starts, lengths)).to(self.device)

    @cached_property
    def borders(self) -> tuple[Tensor, Tensor]:
        """First and last frame of every clip (empty clips have neither)."""
        lengths = np.asarray([n for n in self.inputs.frames if n], dtype=np.int64)
        ends = np.cumsum(lengths)
        return torch.from_numpy(ends - lengths).to(self.device), torch.from_numpy(ends - 1).to(self.device)


class AudioEmbed(nn.Module):
    """Two convolutions with an activation each, the second halving the number of frames, plus positions.

    Small and not divisible by heads, so every tensor-parallel rank holds it whole. Weights are those of a Conv1d with
    (channel, tap) flattened, since a convolution over the pack is a product with three shifted copies side by side.
    """

    def __init__(
        self, settings: AudioSettings, shape: LayerShape, parts: "LayerFactory", activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.max_frames = settings.max_frames
        self.activation = activation
        self.conv1 = nn.Linear(_TAPS * shape.mel_bins, shape.hidden, bias=shape.linear_bias, dtype=parts.dtype)
        self.conv2 = nn.Linear(_TAPS * shape.hidden, shape.hidden, bias=shape.linear_bias, dtype=parts.dtype)
        self.positions: nn.Parameter | None = None
        if shape.position_rows:
            self.positions = nn.Parameter(torch.empty(shape.position_rows, shape.hidden, dtype=parts.dtype))

    def forward(self, hidden: None, context: AudioContext) -> Tensor:
        """Embed log-mel frames (N, mel_bins) to tokens (N / 2, hidden)."""
        mels = context.inputs.mels
        assert mels is not None, "the first audio stage needs frames"
        self._check_lengths(context.inputs.frames)
        frames = self.activation(self.conv1(_beside(mels.to(self.conv1.weight.dtype), context)))
        tokens: Tensor = self.activation(self.conv2(_beside(frames, context, stride=2)))
        if self.positions is not None:
            return tokens + self.positions[context.positions]
        waves = sinusoids(max(context.packing.lengths, default=0), tokens.shape[1], context.device)
        return tokens + waves.to(tokens.dtype)[context.positions]

    def _check_lengths(self, frames: tuple[int, ...]) -> None:
        longest = max(frames, default=0)
        if longest > self.max_frames:
            raise DataError(
                f"a clip is {longest} log-mel frames long, but model.audio.max_frames is {self.max_frames}: "
                "raise max_frames, or lower data.audio.max_seconds"
            )
        assert all(n % 2 == 0 for n in frames), f"every clip needs an even number of frames, got {frames}"


def sinusoids(length: int, width: int, device: torch.device) -> Tensor:
    """(length, width) fixed positions: sines, then cosines, of wavelengths from 2 pi up to 10,000 times as much."""
    half = width // 2
    rates = torch.exp(-math.log(_LONGEST_WAVE) / max(half - 1, 1) * torch.arange(half, device=device))
    angles = torch.arange(length, device=device)[:, None] * rates[None, :]
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def _beside(frames: Tensor, context: AudioContext, stride: int = 1) -> Tensor:
    """Put each frame (of every `stride`) beside those before and after it in its clip: (N, C) -> (N / stride, C * 3).

    Features are ordered (channel, tap) like a flattened Conv1d weight.
    """
    none = frames.new_zeros(1, frames.shape[1])
    first, last = context.borders
    before = torch.cat((none, frames))[:-1].index_fill(0, first, 0)
    after = torch.cat((frames, none))[1:].index_fill(0, last, 0)
    return torch.stack((before[::stride], frames[::stride], after[::stride]), dim=2).flatten(1)
