"""The projector: the last layer of every encoder, which maps its tokens to features of the LLM's width."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmtrain.models.attention import SequenceLayout
from mmtrain.models.attention.index_tables import HostTables
from mmtrain.models.attention.packed_sequences import PackedSequences
from mmtrain.models.kernels.elementwise import activate
from mmtrain.models.kernels.keyed_dropout import DropsInputs, token_keys, with_token_keys
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.host_offload import OffloadedBlocks
from mmtrain.models.stage.stage_inputs import EncoderInput
from mmtrain.recipe.settings.encoder_settings import EncoderSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


IntArray = npt.NDArray[np.int64]


class EncoderContext(Protocol):
    """What the layers of an encoder need to know about one microbatch of items (images, clips)."""

    @property
    def inputs(self) -> EncoderInput:
        """The items."""

    @property
    def item_lengths(self) -> tuple[int, ...]:
        """Tokens of each item."""

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""

    @property
    def offloaded(self) -> OffloadedBlocks:
        """Blocks of the stage whose activations are in host memory."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all items; a stage without blocks has no tables for their `block_packing`."""

    def block_packing(self, layer: LayerShape) -> PackedSequences:
        """Return how tokens are packed in a block: inside items, or inside parts of them, they attend to each other."""

    def block_layout(self, layer: LayerShape) -> SequenceLayout:
        """Return the sequences of `block_packing`, without what depends on the device."""

    def token_order(self, tokens_per_feature: int) -> IntArray | None:
        """Return the places of tokens so ordered that those of one feature are neighbors; None if they are already.

        Extra tokens (class tokens) are left out: (F * tokens_per_feature,) places in [0, T).

        Raises:
            DataError: `tokens_per_feature` does not divide the tokens of an item.
        """

    def tables(self, compute: Callable[[], HostTables]) -> Mapping[str, Tensor]:
        """Return index tables on the device: those that came with the microbatch, else those that `compute` returns."""

    def index_tables(self) -> HostTables:
        """Compute on the host the index tables that blocks need."""


class PlainNorm(nn.Module):
    """RMS norm without weights."""

    def __init__(self, eps: float) -> None:
        """Create the norm with this epsilon."""
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        normalized: Tensor = F.rms_norm(x, x.shape[-1:], None, self.eps)
        return normalized


class DeepStackProjector(nn.Module):
    """A norm over merged tokens and an MLP to the LLM's width, for the output of a block before the last one."""

    def __init__(self, settings: EncoderSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the part of the projector that `shape` describes; its weights are uninitialized."""
        super().__init__()
        merged_width = shape.hidden * shape.projector.joins
        self.activation = settings.projector.activation
        self.norm = factory.projector_norm(shape, merged_width, eps=None)
        self.linear_1 = factory.column_linear(merged_width, shape.dense_mlp.ffn, bias=shape.linear_bias)
        self.linear_2 = factory.row_linear(shape.dense_mlp.ffn, shape.out, bias=shape.linear_bias)

    def forward(self, merged: Tensor) -> Tensor:
        """Map merged tokens (F, merged width) to features (F, llm_hidden)."""
        inner = activate(self.linear_1(self.norm(merged))[0], self.activation)
        out: Tensor = self.linear_2(inner)[0]
        return out


class Projector(nn.Module):
    """Last norm, extra tokens dropped, neighboring tokens merged, and an MLP or one linear to the LLM's width.

    Tokens may be merged by their average, before the last norm or behind it; or by a linear to the width of one. With
    DeepStack, outputs of earlier blocks are merged too, and each goes through a projector of its own.

    A learned newline may follow the features of each item: behind an item of any size, on any rank, it reaches the LLM
    on the way of the features, and its gradient comes back with theirs.
    """

    dropping: Sequence[DropsInputs] = ()  # adapters that drop inputs

    def __init__(self, settings: EncoderSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the projector that `shape` describes; its weights are uninitialized."""
        super().__init__()
        self.tokens_per_feature = shape.projector.joins
        self.dropped_tokens = shape.extra_tokens  # of each item
        self.keeps_all_tokens = settings.kept_extra_tokens > 0  # then none are merged either
        self.pools = shape.projector.pools
        self.pools_before_norm = settings.pools_before_norm
        self.activation = settings.projector.activation
        self.post_norm: nn.Module | None = None
        if settings.has_post_norm:
            eps = settings.projector.norm_eps if settings.merges_by_linear else None
            is_own = settings.merges_by_linear  # a norm of the projector, before it merges
            norm = factory.projector_norm(shape, shape.hidden, eps) if is_own else factory.norm(shape.hidden)
            self.post_norm = norm
        joined_width = shape.hidden if shape.projector.pools else shape.hidden * shape.projector.joins
        merged_width = shape.hidden if shape.projector.merge_linear else joined_width
        self.merge: nn.Module | None = None
        if shape.projector.merge_linear:
            self.merge = factory.row_linear(joined_width, shape.hidden, bias=False, splits_inputs=True)
        self.norm: nn.Module | None = None
        if settings.projector.norm:
            eps = settings.projector.norm_eps
            is_plain = shape.projector.plain_norm
            self.norm = (
                PlainNorm(eps or factory.norm_eps) if is_plain else factory.projector_norm(shape, merged_width, eps)
            )
        self.scales_averages = settings.scales_averages
        self.average_shift: nn.Parameter | None = None
        self.average_scale: nn.Parameter | None = None
        if shape.projector.standardizes:
            self.average_shift, self.average_scale = (_vector(shape.hidden, factory) for _ in range(2))
        self.is_linear = shape.mlp is None
        self._build_linears(merged_width, shape, factory)
        projectors = [DeepStackProjector(settings, shape, factory) for _ in range(shape.carried_in)]
        self.deepstack = nn.ModuleList(projectors)
        self.newline = _vector(shape.out, factory) if shape.projector.newline else None

    def _build_linears(self, merged_width: int, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build what follows the merged tokens."""
        if self.is_linear:  # the last linear of a resampler too, whose merged width is that of its encoder
            self.linear = factory.row_linear(merged_width, shape.out, bias=shape.linear_bias, splits_inputs=True)
        else:
            self.linear_1 = factory.column_linear(merged_width, shape.dense_mlp.ffn, bias=shape.linear_bias)
            self.linear_2 = factory.row_linear(shape.dense_mlp.ffn, shape.out, bias=shape.linear_bias)

    def forward(self, hidden: Tensor, context: EncoderContext, *carried: Tensor) -> Tensor:
        """Map tokens (T, hidden) to features (F, llm_hidden), each from `tokens_per_feature` tokens of one item.

        With a newline, one more row follows the features of each item.

        carried: outputs of earlier blocks, (T, hidden) each. Their features follow in the same rows, so that these are
            (F, (1 + len(carried)) * llm_hidden); those of newlines are zeros.
        """
        with with_token_keys(self.dropping, self._tables(context).get("feature_keys")):
            features = self._project(self._merge_last(hidden, context))
            if carried:
                merged = (self._merge(tokens, context) for tokens in carried)
                earlier = [projector(tokens) for projector, tokens in zip(self.deepstack, merged, strict=True)]
                features = torch.cat((features, *earlier), dim=1)
        return features if self.newline is None else self._with_newlines(features, context)

    def _project(self, features: Tensor) -> Tensor:
        if self.norm is not None:
            features = self.norm(features)
        if self.is_linear:
            only: Tensor = self.linear(features)[0]
            return only
        inner = activate(self.linear_1(features)[0], self.activation)
        out: Tensor = self.linear_2(inner)[0]
        return out

    def _with_newlines(self, features: Tensor, context: EncoderContext) -> Tensor:
        """Put the newline behind the features of each item: (F, width) -> (F + items, width)."""
        assert self.newline is not None
        newline = F.pad(self.newline, (0, features.shape[1] - len(self.newline)))
        num_rows = len(features) + len(context.item_lengths)
        return newline.expand(num_rows, -1).index_copy(0, self._tables(context)["feature_places"], features)

    def index_tables(self, context: EncoderContext) -> HostTables:
        """See `TableUser`: how tokens are ordered, keys of features, and where these stand among newlines."""
        tables: HostTables = {}
        order = None if self.keeps_all_tokens else context.token_order(self.tokens_per_feature)
        if order is not None:
            tables["token_order"] = order
        lengths = np.asarray(context.item_lengths, dtype=np.int64)
        num_features = (lengths - self.dropped_tokens) // self.tokens_per_feature
        if context.inputs.item_keys is not None:
            tables["feature_keys"] = token_keys(context.inputs.item_keys, num_features.tolist())
        if self.newline is not None:
            item = np.repeat(np.arange(len(lengths)), num_features)
            tables["feature_places"] = np.arange(len(item)) + item  # one newline behind each item before
        return tables

    def _tables(self, context: EncoderContext) -> Mapping[str, Tensor]:
        return context.tables(partial(self.index_tables, context))

    def _merge_last(self, hidden: Tensor, context: EncoderContext) -> Tensor:
        """Merge the last block's tokens (T, hidden) to (F, merged width), behind the last norm."""
        if self.post_norm is not None and not self.pools_before_norm:
            hidden = self.post_norm(hidden)
        merged = self._merge(hidden, context)
        if self.post_norm is not None and self.pools_before_norm:
            merged = self.post_norm(merged)
        return merged

    def _merge(self, hidden: Tensor, context: EncoderContext) -> Tensor:
        """Average the tokens of each feature, or put them side by side: (T, hidden) -> (F, merged width)."""
        order = self._tables(context).get("token_order")
        if order is not None:
            hidden = hidden.index_select(0, order)
        if self.merge is not None:
            merged: Tensor = self.merge(self._joined_by_channel(hidden))[0]
            return merged
        if not self.pools:
            return hidden.reshape(-1, hidden.shape[1] * self.tokens_per_feature)
        num_features = len(hidden) // self.tokens_per_feature
        averages = hidden.view(num_features, self.tokens_per_feature, hidden.shape[1]).mean(dim=1)
        return self._scaled(averages) if self.scales_averages else averages

    def _scaled(self, averages: Tensor) -> Tensor:
        """Scale averages (F, hidden) in fp32, and standardize them by stored vectors if there are any."""
        scaled: Tensor = averages.float() * averages.shape[1] ** 0.5
        if self.average_shift is not None and self.average_scale is not None:
            scaled = (scaled - self.average_shift.float()) * self.average_scale.float()
        return scaled.to(averages.dtype)

    def _joined_by_channel(self, hidden: Tensor) -> Tensor:
        """Join the tokens of each feature (T, hidden), channel by channel: (F, hidden * tokens of a feature).

        So torch's `unfold` orders them, and with it the columns of published weights.
        """
        of_features = hidden.view(-1, self.tokens_per_feature, hidden.shape[1])
        return of_features.transpose(1, 2).flatten(1)


def _vector(width: int, factory: "LayerFactory") -> nn.Parameter:
    return nn.Parameter(torch.empty(width, dtype=factory.dtype))
