"""The merger: a projector with a convolution over merged patches and a gated MLP, as that of GLM-4.1V."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from mmtrain.models.kernels.elementwise import activate_gated
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.stage.projector import Projector
from mmtrain.recipe.settings.encoder_settings import EncoderSettings

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory


class Merger(Projector):
    """A last norm, a convolution of each merged square, a linear, a layer norm, GELU, and a gated MLP.

    The convolution (arXiv 2507.01006) has the square as its kernel and its stride, so that it is a linear of merged
    tokens. All behind it is of the LLM's width. Tensor parallelism splits the outputs of the convolution, the inputs of
    the linear behind it, and the inner width of the MLP.
    """

    def __init__(self, settings: EncoderSettings, shape: LayerShape, factory: "LayerFactory") -> None:
        """Build the merger that `shape` describes; its weights are uninitialized."""
        super().__init__(settings, shape, factory)
        self.fused_kernels = factory.fused_kernels
        as_layer_norm = replace(shape, rms_norm=False)
        self.inner_norm = factory.projector_norm(as_layer_norm, shape.out, settings.projector.norm_eps)

    def _build_linears(self, merged_width: int, shape: LayerShape, factory: "LayerFactory") -> None:
        ffn, bias = shape.dense_mlp.ffn, shape.linear_bias
        self.downsample = factory.column_linear(merged_width, shape.out, bias=True)
        self.proj = factory.row_linear(shape.out, shape.out, bias=bias)
        self.linear_1 = factory.column_linear(shape.out, 2 * ffn, bias=bias, gated=True)
        self.linear_2 = factory.row_linear(ffn, shape.out, bias=bias)

    def _project(self, features: Tensor) -> Tensor:
        features = self.proj(self.downsample(features)[0])[0]
        inner = self.linear_1(F.gelu(self.inner_norm(features)))[0]
        out: Tensor = self.linear_2(activate_gated(inner, self.activation, fused=self.fused_kernels))[0]
        return out
