"""Gated DeltaNet in the place of a block's attention (arXiv 2412.06464), on tokens packed as (T, 1, features).

Tensor parallelism divides the key heads, each with the value heads that it serves: the rows of the first linear and of
the convolution are those of one key head after the other. Sequence parallelism gathers the tokens before the first
linear, so that every rank sees all tokens of its heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.delta_rule import (
    DeltaWeights,
    DeltaWidths,
    mix_and_keep_state,
    mix_next_token,
    mix_samples,
)
from mmtrain.models.attention.kv_cache import KVCache
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.attention.sample_chunks import samples_by_chunks
from mmtrain.models.megatron.lora import ColumnLinear, RowLinear
from mmtrain.models.megatron.parallel_groups import ParallelGroups
from mmtrain.models.shapes.layer_shape import GatedDeltaNet


class DeltaNetMixer(nn.Module):
    """The mixer; `linear_in` makes for each key head query, key, values, gates, and rates and steps of its states."""

    def __init__(
        self, shape: GatedDeltaNet, config: TransformerConfig, groups: ParallelGroups, norm: nn.Module
    ) -> None:
        """Build this rank's heads, with uninitialized weights.

        norm: holds the weight of the norm over each head's output.
        """
        super().__init__()
        ratio = shape.value_heads // shape.key_heads
        self.num_heads = shape.key_heads // groups.tp_size
        self.widths = DeltaWidths(shape.key_head_dim, shape.value_head_dim, ratio, config.layernorm_epsilon)
        arguments: dict[str, Any] = {
            "config": config, "init_method": None, "bias": False, "tp_group": groups.tp, "skip_bias_add": True,
        }  # fmt: skip
        self.linear_in = ColumnLinear(config.hidden_size, shape.first_width, **arguments)
        self.linear_proj = RowLinear(shape.inner_width, config.hidden_size, input_is_parallel=True, **arguments)
        self.taps = _of_own_heads(self.num_heads * self.widths.convolved, shape.taps, dtype=config.params_dtype)
        self.decay_log = _of_own_heads(self.num_heads * ratio, dtype=config.params_dtype)
        self.step_bias = _of_own_heads(self.num_heads * ratio, dtype=config.params_dtype)
        self.norm = norm

    @property
    def first_linear(self) -> nn.Module:
        """Return the linear that reads the block's normalized hidden states."""
        return self.linear_in

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Compute of (T, 1, hidden) what `mix` reads."""
        return (self.linear_in(x)[0],)

    def mix(self, packing: PackedSequences, x: Tensor) -> tuple[Tensor]:
        """Mix the tokens of each sample, from a state of zeros at its start: (T, 1, values of this rank)."""
        heads = x.view(len(x), self.num_heads, -1)
        if packing.kv_cache is not None:
            out = self._mix_and_cache(heads, packing.layout, packing.kv_cache)
        elif packing.context is not None:
            out = packing.context.mix(heads, self._mix_heads)
        else:
            out = self._mix_heads(heads, packing.layout, slice(0, self.num_heads))
        return (out.flatten(1).unsqueeze(1),)

    def _mix_heads(self, x: Tensor, layout: SequenceLayout, heads: slice) -> Tensor:
        """Mix (T, heads, inputs) of some key heads of this rank."""
        return mix_samples(x, self._weights().of_heads(heads), self.widths, layout.sample_chunks(x.device))

    def _weights(self) -> DeltaWeights:
        of_heads = (self.num_heads, -1)
        taps = self.taps.view(*of_heads, self.taps.shape[1])
        norm: Tensor = self.norm.weight  # type: ignore[assignment]
        return DeltaWeights(taps, self.decay_log.view(of_heads), self.step_bias.view(of_heads), norm)

    def _mix_and_cache(self, heads: Tensor, layout: SequenceLayout, cache: KVCache) -> Tensor:
        """Mix prompts, or the next token of each sequence; keep the states, and what the convolution reads next.

        Further sequences of the layout are padding, whose result is zero.
        """
        lengths = layout.lengths[: len(cache.cached_lengths)]
        num_padding = len(heads) - sum(lengths)
        heads = heads[: sum(lengths)]
        convolved = heads[..., : self.widths.convolved]
        kept = cache.states.get(self)
        if kept is None:
            prompts = SequenceLayout(lengths)
            chunks = prompts.sample_chunks(heads.device)
            out, states = mix_and_keep_state(heads, self._weights(), self.widths, chunks)
            rank = torch.from_numpy(samples_by_chunks(lengths)[1].argsort()).to(heads.device)
            states = states.index_select(0, rank)
            last = [
                F.pad(rows, (0, 0, 0, 0, self.num_earlier, 0))[len(rows) :]
                for rows in torch.split(convolved, list(lengths))
            ]
            earlier = torch.stack(last)
        else:
            assert len(heads) == len(lengths), "after the first pass a sequence grows by one token at a time"
            earlier, states = kept
            window = torch.cat((earlier, convolved.unsqueeze(1)), dim=1)
            out, states = mix_next_token(heads, window, states, self._weights(), self.widths)
            earlier = window[:, 1:]
        cache.states[self] = (earlier, states)
        return F.pad(out, (0, 0, 0, 0, 0, num_padding))

    @property
    def num_earlier(self) -> int:
        """Return how many tokens before its own the convolution reads."""
        return self.taps.shape[1] - 1


def _of_own_heads(*size: int, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialized parameter whose rows belong to this rank's heads."""
    parameter = nn.Parameter(torch.empty(size, dtype=dtype))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim = 0  # type: ignore[attr-defined]
    parameter.partition_stride = 1  # type: ignore[attr-defined]
    return parameter
