"""Low-rank adapters on tensor-parallel linears (LoRA, arXiv 2106.09685): `y = W x + (alpha / rank) B A x`.

Tensor parallelism splits an adapter along the dimension of its linear that is split: B on outputs if the linear splits
its outputs, A on inputs if it splits its inputs. Every rank holds all of the other half. Between the two lie `rank`
features of each token, so what the ranks exchange is small. `mmtrain.models.megatron.block_segments` may leave the
communication of a linear to its caller (`explicit_expert_comm`); the adapter's result then goes through it too.

Dropout on an adapter's input needs to know which tokens the rows are: see `keyed_dropout.with_token_keys`.
"""

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from torch import Tensor, nn

from mmtrain.models.kernels.keyed_dropout import KeyedDropout, dropped_linear, key_of
from mmtrain.models.megatron.tp_linear import reduced_linear, tp_linear
from mmtrain.models.shapes.layer_shape import LoraShape


class LoraAdapter(nn.Module):
    """The two matrices beside one linear: `a` (rank, inputs) and `b` (outputs, rank), or this rank's shard of them.

    If parts of the linear have adapters of their own, `a` has the rows of all of them, one below the other. Each row of
    `b` belongs to the part of its output. Rows of parts without one stay as they are, and count as zeros.
    """

    part_of_rows: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        shape: LoraShape,
        like: Tensor,
        part_of_rows: Tensor | None = None,
        dropout: KeyedDropout | None = None,
    ) -> None:
        """Create uninitialized matrices with the dtype and device of the weight `like`.

        part_of_rows: (outputs, parts), 1 where an output belongs to a part, else 0; None for one adapter on all.
        dropout: of inputs; None for none.
        """
        super().__init__()
        self.scale = shape.scale
        self.dropout = dropout
        self.token_keys: Tensor | None = None  # set by `with_token_keys` while the model trains
        num_parts = 1 if part_of_rows is None else part_of_rows.shape[1]
        if part_of_rows is not None:
            part_of_rows = part_of_rows.to(like)
        self.register_buffer("part_of_rows", part_of_rows, persistent=False)
        self.a = nn.Parameter(torch.empty(num_parts * shape.rank, inputs, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.empty(outputs, shape.rank, dtype=like.dtype, device=like.device))

    def first(self, x: Tensor, shard: int) -> Tensor:
        """Return the features between, (..., parts * rank), of inputs (..., inputs), some of which are dropped.

        shard: which shard of the tokens the rows of x are, where they are not all of them.
        """
        if self.dropout is None or self.token_keys is None:
            return F.linear(x, self.a)
        num_rows = x.numel() // x.shape[-1]
        keys = self.token_keys
        if num_rows != len(keys):
            keys = keys[shard * num_rows : (shard + 1) * num_rows]
        return dropped_linear(x, self.a, keys, self.dropout)

    def second(self) -> Tensor:
        """Return what multiplies the features between: `b`, or (outputs, parts * rank) with zeros for other parts."""
        if self.part_of_rows is None:
            return self.b
        return (self.part_of_rows.unsqueeze(-1) * self.b.unsqueeze(1)).flatten(1)


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]  # Megatron-core has no types
    """Column-parallel linear that may have an adapter, and whose bias can train while its weight is frozen.

    A part of the bias may be absent: where `bias_mask` is 0, the bias is 0 and has no gradient.
    """

    bias_mask: Tensor | None
    num_chunks = 1  # of the tokens; with more, communication overlaps with GEMMs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Build the linear as Megatron-core does, without an adapter: see `add_adapter`."""
        super().__init__(*args, **kwargs)
        self.register_buffer("bias_mask", None, persistent=False)
        self.lora: LoraAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute (..., outputs / tp) of (..., inputs); the bias is returned where it is to be added later."""
        out, bias = super().forward(input_, *args, **kwargs)
        return (out if self.lora is None else out + self._adapted(self.lora, input_)), bias

    def _adapted(self, lora: LoraAdapter, x: Tensor) -> Tensor:
        """Return the adapter's share of this rank's outputs.

        Gradients of A: each rank has that of its tokens under sequence parallelism, which are summed with those of
        norms; else each has all of it.
        """
        rank = self.tp_group.rank()
        if not self.sequence_parallel:
            if self.explicit_expert_comm:
                x = _divide_gradient(x, self.tp_group.size())  # the caller sums it over the ranks
            low = copy_to_tensor_model_parallel_region(lora.first(x, rank), group=self.tp_group)
        elif self.explicit_expert_comm:
            low = lora.first(x, rank)
        else:
            low = gather_from_sequence_parallel_region(
                lora.first(x, rank), tensor_parallel_output_grad=True, group=self.tp_group
            )
        return F.linear(low * lora.scale, lora.second())

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **_: object,
    ) -> Tensor:
        if bias is not None and self.bias_mask is not None:
            bias = bias * self.bias_mask
        return tp_linear(
            input,
            weight,
            bias,
            self.tp_group,
            sums_input_grad=allreduce_dgrad,
            gathers_tokens=sequence_parallel,
            num_chunks=self.num_chunks,
        )


class RowLinear(RowParallelLinear):  # type: ignore[misc]  # Megatron-core has no types
    """Row-parallel linear that may have an adapter.

    Where no rank has a summand but this one, its GEMM adds the bias; else the bias is `late_bias`.
    """

    num_chunks = 1  # of the tokens; with more, communication overlaps with GEMMs

    def __init__(self, *args: Any, skip_bias_add: bool, **kwargs: Any) -> None:
        """Build the linear as Megatron-core does, without an adapter: see `add_adapter`.

        skip_bias_add: the caller adds the bias that `forward` returns.
        """
        super().__init__(*args, skip_bias_add=True, **kwargs)
        self.returns_bias = skip_bias_add
        self.lora: LoraAdapter | None = None

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute (..., outputs) of (..., inputs / tp), and return the bias that is left to the caller."""
        if self.num_chunks > 1 and not self.explicit_expert_comm:
            is_sharded = self.sequence_parallel
            out = reduced_linear(
                input_, self.weight, self.tp_group, scatters_tokens=is_sharded, num_chunks=self.num_chunks
            )
        else:
            out, _ = super().forward(input_)
        if self.lora is not None:
            out = out + self._adapted(self.lora, input_)
        bias = self.late_bias
        if bias is None or self.returns_bias:
            return out, bias
        return out + bias, None

    @property
    def late_bias(self) -> Tensor | None:
        """Return the bias that is to be added once the ranks' summands are; None if there is none, or it was added."""
        bias: Tensor | None = self.bias if self.tp_group.size() > 1 else None
        return bias

    def _forward_impl(self, input: Tensor, weight: Tensor, **_: object) -> Tensor:
        return tp_linear(input, weight, None if self.tp_group.size() > 1 else self.bias, self.tp_group)

    def _adapted(self, lora: LoraAdapter, x: Tensor) -> Tensor:
        """Return the adapter's output, which is this rank's summand if the caller sums over the ranks."""
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, group=self.tp_group)
        low = lora.first(x, self.tp_group.rank())
        if not self.sequence_parallel:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        elif not self.explicit_expert_comm:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        out = F.linear(low * lora.scale, lora.b)
        if self.explicit_expert_comm and not self.sequence_parallel:
            out = _divide_value(out, self.tp_group.size())
        return out


def add_adapter(linear: nn.Module, shape: LoraShape, layer: str, name: str, tp_rank: int) -> LoraAdapter:
    """Give a linear an adapter with uninitialized matrices, marked as tensor parallelism splits them; return it.

    layer: its plan-independent name. name: of the linear inside the layer.
    """
    assert isinstance(linear, ColumnLinear | RowLinear), f"{type(linear).__name__} cannot have an adapter"
    outputs, inputs = linear.weight.shape
    parts, part_of_rows = shape.parts_of(name), None
    if parts is not None:
        stride = linear.weight.partition_stride  # each rank holds its rows of each part, or a share of all rows
        sizes = parts.sizes if stride == 1 else tuple(outputs // stride for _ in parts.sizes)
        part_of_rows = torch.tensor(replace(parts, sizes=sizes).memberships(outputs, first=tp_rank * outputs))
    dropout = None
    if shape.dropout:
        first_input = tp_rank * inputs if isinstance(linear, RowLinear) else 0
        dropout = KeyedDropout(shape.dropout, key_of(layer, name), first_input)
    lora = LoraAdapter(inputs, outputs, shape, linear.weight, part_of_rows, dropout)
    if isinstance(linear, ColumnLinear):
        split, whole, stride = lora.b, lora.a, linear.weight.partition_stride
    else:
        split, whole, stride = lora.a, lora.b, 1
    split.tensor_model_parallel = True  # type: ignore[attr-defined]
    split.partition_dim = linear.weight.partition_dim  # type: ignore[attr-defined]
    split.partition_stride = stride  # type: ignore[attr-defined]
    whole.sequence_parallel = linear.sequence_parallel  # type: ignore[attr-defined]
    linear.lora = lora
    return lora


class _DividedGradient(torch.autograd.Function):
    """Pass a tensor on; divide its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.divisor, None


class _DividedValue(torch.autograd.Function):
    """Divide a tensor; pass its gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        return x / divisor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _divide_gradient(x: Tensor, divisor: int) -> Tensor:
    return cast(Tensor, _DividedGradient.apply(x, divisor))  # type: ignore[no-untyped-call]


def _divide_value(x: Tensor, divisor: int) -> Tensor:
    return cast(Tensor, _DividedValue.apply(x, divisor))  # type: ignore[no-untyped-call]
