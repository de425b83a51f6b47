"""Build one pipeline stage: from settings and a range of layers to a torch module with its initial weights.

The same recipe and seed give the same weights on any mesh and for any split into stages, because every parameter is
drawn under its plan-independent name (`mmtrain.models.optim.parameter_specs`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from mmtrain.models.attention import AttentionBackend, choose_backend, prepare_attention
from mmtrain.models.generator.dit_layers import DIT_NORM_EPS
from mmtrain.models.generator.generator_stage import GeneratorStage
from mmtrain.models.guest_factory import build_guest_stage
from mmtrain.models.kernels.choice import uses_fused_kernels
from mmtrain.models.optim.parameter_specs import WeightSource, initialize_parameters, stage_param_specs
from mmtrain.models.shapes.layer_shape import BLOCK_KINDS, Attention
from mmtrain.models.shapes.model_shape import ModelShape
from mmtrain.models.shapes.unit_shape import UnitShape
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe.settings.encoder_settings import Activation
from mmtrain.recipe.settings.model_settings import ModelSettings
from mmtrain.recipe.settings.train_settings import KernelSetting

if TYPE_CHECKING:
    from mmtrain.models.megatron import LayerFactory, ParallelGroups

_LLM_ACTIVATIONS: dict[str, Activation] = {"swiglu": "silu", "geglu": "gelu_tanh", "gelu": "gelu"}  # by kind of MLP


@dataclass(frozen=True)
class StageOptions:
    """What all stages of a run have in common."""

    dtype: torch.dtype
    device: torch.device
    seed: int
    attention: Literal["auto"] | AttentionBackend = "auto"
    pretrained: WeightSource | None = None  # what it has weights for starts with those
    kernels: KernelSetting = "auto"


def build_stage(
    settings: ModelSettings, shape: ModelShape, spec: StageSpec, groups: "ParallelGroups", options: StageOptions
) -> StageModule:
    """Build this rank's part of one stage, with initial weights, and with gradients off for frozen parameters.

    Raises:
        UserError: the attention backend, or fused kernels, do not work here; a guest cannot be built.
    """
    stage = build_stage_without_weights(settings, shape, spec, groups, options)
    param_specs = stage_param_specs(stage, spec.unit, groups.tp_size)
    initialize_parameters(stage, param_specs, options.seed, groups.tp_rank, groups.tp_size, options.pretrained)
    return stage.to(options.device)


def build_stage_without_weights(
    settings: ModelSettings, shape: ModelShape, spec: StageSpec, groups: "ParallelGroups", options: StageOptions
) -> StageModule:
    """Build what `build_stage` does, with weights that are not set yet: memory of the host that nothing has touched.

    Raises as `build_stage` does.
    """
    from mmtrain.models.megatron import prepare_megatron

    prepare_megatron(options.device)
    prepare_attention(options.device)
    factory = _layer_factory(settings, shape.unit(spec.unit), spec, groups, options)
    if settings.guest:
        return build_guest_stage(settings, shape, spec, factory)
    is_generator = shape.unit(spec.unit).kind == "generator"
    stage = (GeneratorStage if is_generator else StageModule)(settings, shape, spec, factory)
    _freeze(stage)
    return stage


def _layer_factory(
    settings: ModelSettings, unit: UnitShape, spec: StageSpec, groups: "ParallelGroups", options: StageOptions
) -> "LayerFactory":
    from mmtrain.models.megatron import LayerFactory

    kinds = (*BLOCK_KINDS, "dit_block", "unet_attention")
    block = next(layer for layer in unit.layers if layer.kind in kinds and isinstance(layer.mixer, Attention))
    attending = [layer for layer in unit.layers if isinstance(layer.mixer, Attention)]
    query_scale = None
    if unit.kind == "generator":
        activation: Activation = "gelu_tanh"
        norm_eps = DIT_NORM_EPS
    elif unit.kind == "llm":
        activation = _LLM_ACTIVATIONS[settings.llm.mlp]
        norm_eps = settings.llm.norm_eps
        query_scale = settings.llm.query_scale
    else:
        encoder = settings.all_encoders[unit.name]
        activation = encoder.activation
        norm_eps = encoder.norm_eps
        query_scale = encoder.query_scale
    return LayerFactory(
        block=block,
        activation=activation,
        norm_eps=norm_eps,
        groups=groups,
        dtype=options.dtype,
        attention=choose_backend(
            options.attention, options.device, options.dtype, max(layer.attention.head_dim for layer in attending)
        ),
        sequence_parallel=spec.sequence_parallel and groups.tp_size > 1,
        fused_kernels=uses_fused_kernels(options.kernels, options.device),
        query_scale=query_scale,
        tp_chunks=spec.tp_chunks,
    )


def _freeze(stage: StageModule) -> None:
    """Turn off the gradients of the parameters that the recipe freezes."""
    for index, module in stage.layers.items():
        layer = stage.shape.layers[int(index)]
        for name, param in module.named_parameters():
            param.requires_grad_(name not in layer.frozen)
        if layer.trains_experts:
            stage.factory.join_backward(module)
