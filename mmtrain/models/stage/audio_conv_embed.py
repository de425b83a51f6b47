"""The embedding layer of an audio encoder that convolves over time and mel bands (Qwen3-Omni, arXiv 2509.17765).

A clip is cut into chunks, and three convolutions with stride 2 compute each chunk by itself. Frames of a chunk lie in
whole tokens: a chunk of 100 frames lies in 104 rows, 13 tokens of 8, of which the last four are zeros. See
`AudioSettings.count_cells`.
"""

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.attention.index_tables import HostTables
from mmtrain.models.kernels.elementwise import activate
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.audio_layers import AudioContext, cut, ranges, sinusoids
from mmtrain.recipe.settings.audio_settings import AudioSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory

_KERNEL_SIDE = 3
_STRIDE = 2


class AudioConvEmbed(nn.Module):
    """Three convolutions with activations, a linear over channels and mel bands, plus positions inside a chunk.

    Its widths need not divide by the TP degree, so every tensor-parallel rank holds all of it. The weight of a
    convolution is (out, in * 3 * 3), flattened.
    """

    def __init__(self, settings: AudioSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the layer that `shape` describes; its weights are uninitialized."""
        super().__init__()
        assert settings.chunk is not None, "settings with conv_channels have chunks"
        self.activation = settings.activation
        self.chunk_frames = settings.chunk
        self.chunk_tokens = settings.chunk_tokens
        self.chunk_rows = settings.chunk_cells
        channels, dtype = shape.media.conv_channels, factory.dtype
        area = _KERNEL_SIDE**2
        self.conv1 = nn.Linear(area, channels, bias=shape.linear_bias, dtype=dtype)
        self.conv2 = nn.Linear(area * channels, channels, bias=shape.linear_bias, dtype=dtype)
        self.conv3 = nn.Linear(area * channels, channels, bias=shape.linear_bias, dtype=dtype)
        self.conv_out = nn.Linear(channels * shape.media.conv_bands[-1], shape.hidden, bias=False, dtype=dtype)

    def forward(self, hidden: None, context: AudioContext) -> Tensor:
        """Embed rows of log-mel frames (N, mel_bins) to tokens (T, hidden)."""
        mels = context.inputs.numbers(self.conv1.weight.dtype)
        assert mels is not None, "the first audio stage needs log-mel frames"
        tables = context.tables(partial(self.index_tables, context))
        padded = torch.cat((mels, mels.new_zeros(1, mels.shape[1])))
        chunks = padded.index_select(0, tables["chunk_rows"]).view(-1, self.chunk_rows, mels.shape[1])
        convolved = self._convolve(chunks.transpose(1, 2).unsqueeze(1), tables["seen_frames"])
        tokens: Tensor = self.conv_out(convolved.permute(0, 3, 1, 2).flatten(2))
        table = sinusoids(self.chunk_tokens, tokens.shape[2], context.device)
        return (tokens + table.to(tokens.dtype)).flatten(0, 1).index_select(0, tables["token_places"])

    def _convolve(self, chunks: Tensor, num_seen: Tensor) -> Tensor:
        """Convolve chunks (C, 1, mel_bins, rows) to (C, channels, mel_bins / 8, rows / 8).

        num_seen: (C,) the rows of each chunk beyond which convolutions see zeros, as at the end of a clip.
        """
        for conv in (self.conv1, self.conv2, self.conv3):
            weight = conv.weight.view(len(conv.weight), chunks.shape[1], _KERNEL_SIDE, _KERNEL_SIDE)
            chunks = activate(F.conv2d(chunks, weight, conv.bias, stride=_STRIDE, padding=1), self.activation)
            if conv is self.conv3:
                break
            num_seen = (num_seen + 1) // _STRIDE
            is_seen = torch.arange(chunks.shape[3], device=chunks.device) < num_seen[:, None]
            chunks = chunks * is_seen[:, None, None]
        return chunks

    def index_tables(self, context: AudioContext) -> HostTables:
        """See `TableUser`: which rows the chunks have, up to which the convolutions see, and where tokens are."""
        lengths = np.asarray([*cut(context.inputs.rows, self.chunk_rows)], dtype=np.int64)
        starts, within = np.cumsum(lengths) - lengths, np.arange(self.chunk_rows)
        rows = np.where(within < lengths[:, None], starts[:, None] + within, lengths.sum())
        num_tokens = -(-lengths // context.frames_per_token)
        return {
            "chunk_rows": rows.flatten(),
            "seen_frames": np.minimum(lengths, self.chunk_frames),
            "token_places": ranges(np.arange(len(lengths)) * self.chunk_tokens, num_tokens),
        }
