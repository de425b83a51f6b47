"""Parts of a transformer block that Megatron-core does not have: other residuals, and norms over all heads."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

OutputWithBias = tuple[Tensor, Tensor | None]


class ScaledAdd(nn.Module):
    """Add an output to the residual stream, multiplied by a learned vector (CaiT's layer scale, arXiv 2103.17239).

    It takes the place of Megatron-core's `get_bias_dropout_add`.
    """

    def __init__(self, config: TransformerConfig) -> None:
        """Create the vector; under sequence parallelism its gradient is summed over the TP group."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, training: bool, fused: bool) -> Callable[[OutputWithBias, Tensor, float], Tensor]:
        """Return the function that Megatron-core calls with (output, bias), residual and a dropout of 0."""
        return lambda output, residual, _dropout: self.add(output, residual)

    def add(self, output_with_bias: OutputWithBias, residual: Tensor) -> Tensor:
        """Return residual + scale * (output + bias), all (..., hidden)."""
        output, bias = output_with_bias
        return residual + self.weight * (output if bias is None else output + bias)


class NormedAdd(nn.Module):
    """Add the norm of an output to the residual stream (Gemma 2, arXiv 2408.00118).

    It takes the place of Megatron-core's `get_bias_dropout_add`.
    """

    def __init__(self, build_norm: Callable[[], nn.Module]) -> None:
        """Create the norm, which sees the same shard of the tokens as the block's others."""
        super().__init__()
        self.norm = build_norm()

    def forward(self, training: bool, fused: bool) -> Callable[[OutputWithBias, Tensor, float], Tensor]:
        """Return the function that Megatron-core calls with (output, bias), residual and a dropout of 0."""
        return lambda output, residual, _dropout: self.add(output, residual)

    def add(self, output_with_bias: OutputWithBias, residual: Tensor) -> Tensor:
        """Return residual + norm(output + bias), all (..., hidden)."""
        output, bias = output_with_bias
        normalized: Tensor = self.norm(output if bias is None else output + bias)
        return residual + normalized


class LayerInput(nn.Module):
    """Add to a block's output what a linear makes of its gate times the block's own input (Gemma 3n).

    All ranks of a TP group compute it alike, or for their tokens under sequence parallelism.
    """

    def __init__(
        self, config: TransformerConfig, width: int, norm: nn.Module, activate_gate: Callable[[Tensor], Tensor]
    ) -> None:
        """Create the linears, uninitialized; `norm` is that of the output."""
        super().__init__()
        self.gate = _whole_linear(config.hidden_size, width, config)
        self.projection = _whole_linear(width, config.hidden_size, config)
        self.norm = norm
        self.activate_gate = activate_gate

    def forward(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        """Map (T, hidden) and (T, width) to (T, hidden)."""
        gated = self.activate_gate(self.gate(hidden)) * layer_input
        normalized: Tensor = self.norm(self.projection(gated))
        return hidden + normalized


def _whole_linear(inputs: int, outputs: int, config: TransformerConfig) -> nn.Linear:
    """Build a linear without bias that is whole on every rank, with uninitialized weights."""
    linear = nn.Linear(inputs, outputs, bias=False, device="meta")
    linear.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
    linear.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return linear


class LayerInputs(nn.Module):
    """Make the own inputs of all blocks: rows of a table for tokens, and a linear of their embeddings (Gemma 3n)."""

    def __init__(
        self, config: TransformerConfig, table: nn.Module, norm: nn.Module, width: int, num_blocks: int
    ) -> None:
        """Create the linear, uninitialized; a row of `table` has `width` features of each block, as `norm` reads."""
        super().__init__()
        self.table = table
        self.linear = _whole_linear(config.hidden_size, num_blocks * width, config)
        self.norm = norm
        self.width = width
        self.table_scale = torch.tensor(width**0.5, dtype=config.params_dtype).item()
        self.linear_scale = config.hidden_size**-0.5

    def forward(self, ids: Tensor, embeddings: Tensor) -> Tensor:
        """Map ids (T,) and embeddings (T, hidden) to (T, blocks * width)."""
        projected = (self.linear(embeddings) * self.linear_scale).unflatten(1, (-1, self.width))
        of_tokens = self.table(ids) * self.table_scale
        mean: Tensor = (self.norm(projected).flatten(1) + of_tokens) * 0.5**0.5
        return mean


def add_to_residual(add: Any, output_with_bias: OutputWithBias, residual: Tensor) -> Tensor:
    """Add what attention or MLP put out, as the block's `add` does: a module of this file, or a plain sum."""
    if isinstance(add, ScaledAdd | NormedAdd):
        return add.add(output_with_bias, residual)
    output, bias = output_with_bias
    return residual + (output if bias is None else output + bias)


class JointHeadNorm(nn.Module):
    """RMS norm over all heads of queries, or of keys, together.

    Each rank of the TP group holds the weights of its own heads; the ranks sum the squares of all.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, tp_group: dist.ProcessGroup) -> None:
        """Create the weights of this rank's heads, `hidden_size` wide each."""
        super().__init__()
        self.eps = eps
        self.tp_group = tp_group
        self.tp_size = config.tensor_model_parallel_size
        width = config.num_attention_heads * hidden_size // self.tp_size
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype))

    def forward(self, heads: Tensor) -> Tensor:
        """Normalize (T, 1, heads / tp, d)."""
        features = heads.flatten(2).float()
        squares = features.square().sum(dim=-1, keepdim=True)
        if self.tp_size > 1:
            # Each rank needs the sum, and each rank's output gives it a gradient: both directions add up.
            squares = reduce_from_tensor_model_parallel_region(squares, group=self.tp_group)
            squares = copy_to_tensor_model_parallel_region(squares, group=self.tp_group)
        mean_square = squares / (features.shape[-1] * self.tp_size)
        normalized = features * torch.rsqrt(mean_square + self.eps)
        return (self.weight * normalized.to(heads.dtype)).view_as(heads)
