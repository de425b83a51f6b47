"""The U-Net against `diffusers`: outputs and gradients, for images of equal and of several sizes."""

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from mmtrain.costs import layer_arithmetic
from mmtrain.errors import DataError
from mmtrain.models.shapes.generator_shapes import generator_layers, generator_parameters
from mmtrain.models.stage.generator_input import GeneratorInput, GeneratorState
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.presets import GENERATOR_PRESETS
from tests.models.generator.tiny import (
    LLM_HIDDEN,
    UNET,
    assert_equal_gradients,
    build,
    images_of,
    load,
    patches_of,
    relative_error,
    run,
    shuffle,
)

SETTINGS = GeneratorSettings(**UNET)
EQUAL_SIZES = [(8, 8), (8, 8), (8, 8)]
MIXED_SIZES = [(4, 12), (8, 8), (4, 12), (4, 4)]
VARIANTS: dict[str, dict[str, Any]] = {
    "three levels": {},
    "one level": {"widths": (16,), "heads": (2,), "layers": 1},
    "two levels, a skip of every width": {"widths": (8, 24), "heads": (2, 3), "layers": 3},
}


def reference_model(settings: GeneratorSettings, **more: Any) -> UNet2DConditionModel:
    num_coarser = len(settings.widths) - 1
    return UNet2DConditionModel(
        sample_size=settings.sample_size,
        in_channels=settings.channels,
        out_channels=settings.channels,
        layers_per_block=settings.layers,
        block_out_channels=settings.widths,
        norm_num_groups=settings.norm_groups,
        cross_attention_dim=settings.context_width,
        attention_head_dim=settings.heads,
        use_linear_projection=True,
        down_block_types=(*["CrossAttnDownBlock2D"] * num_coarser, "DownBlock2D"),
        up_block_types=("UpBlock2D", *["CrossAttnUpBlock2D"] * num_coarser),
        **more,
    )


def shuffled_reference(settings: GeneratorSettings) -> UNet2DConditionModel:
    torch.manual_seed(0)
    model = reference_model(settings)
    shuffle(model)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [EQUAL_SIZES, MIXED_SIZES], ids=["equal sizes", "mixed sizes"])
def test_outputs_and_gradients_equal_those_of_diffusers(sizes: list[tuple[int, int]], variant: str) -> None:
    """Images of mixed sizes are a microbatch here and run one by one there."""
    settings = GeneratorSettings(**{**UNET, **VARIANTS[variant]})
    theirs = shuffled_reference(settings)
    ours = build(settings)
    load(ours, theirs.state_dict(), settings)
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(settings.channels, *size, generator=generator) for size in sizes]
    timesteps = torch.randint(0, 1000, (len(sizes),), generator=generator)
    context = torch.randn(len(sizes), settings.context_tokens, settings.context_width, generator=generator)
    their_context, our_context = (context.clone().requires_grad_() for _ in range(2))
    expected = [
        theirs(image[None], timesteps[i], their_context[i : i + 1], return_dict=False)[0][0]
        for i, image in enumerate(images)
    ]
    rows, cols = zip(*sizes, strict=True)
    inputs = GeneratorInput(rows, cols, patches_of(images, 1), timesteps)
    outputs = images_of(run(ours[1:], GeneratorState(our_context.flatten(0, 1)), inputs), sizes, patch=1)
    for ours_of_image, theirs_of_image in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours_of_image, theirs_of_image, atol=1e-4, rtol=1e-4)

    for out, reference in zip(outputs, expected, strict=True):
        weight = torch.randn(out.shape, generator=generator)
        (out * weight).sum().backward(retain_graph=True)
        (reference * weight).sum().backward()
    assert our_context.grad is not None
    assert their_context.grad is not None
    assert relative_error(our_context.grad, their_context.grad) < 1e-3
    assert_equal_gradients(ours, theirs, settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes_count_the_parameters_of_the_modules(variant: str) -> None:
    settings = GeneratorSettings(**{**UNET, **VARIANTS[variant]})
    for layer, module in zip(generator_layers(settings, LLM_HIDDEN), build(settings), strict=True):
        params = dict(module.named_parameters())
        assert layer_arithmetic.num_parameters(layer) == sum(p.numel() for p in params.values()), layer.kind
        assert set(generator_parameters(layer)) == set(params), layer.kind


def test_the_parameters_of_stable_diffusion_are_those_of_diffusers() -> None:
    settings = GeneratorSettings(**GENERATOR_PRESETS["stable-diffusion-2.1"].settings)
    with torch.device("meta"):
        model = reference_model(settings)
    layers = generator_layers(settings, LLM_HIDDEN)[1:]
    assert sum(map(layer_arithmetic.num_parameters, layers)) == model.num_parameters()


def test_a_microbatch_without_images_gives_every_parameter_a_zero_gradient() -> None:
    modules = build(SETTINGS)
    inputs = GeneratorInput((), (), torch.empty(0, SETTINGS.channels), torch.empty(0))
    out = run(modules, GeneratorState(torch.empty(0, LLM_HIDDEN)), inputs)
    assert out.shape == (0, SETTINGS.channels)
    out.sum().backward()
    for name, param in modules.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


def test_sides_that_the_levels_do_not_divide_are_named() -> None:
    modules = build(SETTINGS)
    inputs = GeneratorInput((8,), (6,), torch.zeros(48, SETTINGS.channels), torch.zeros(1))
    with pytest.raises(DataError, match=r"8 x 6 latent positions.*2 times.*multiples of 4"):
        run(modules, GeneratorState(torch.zeros(SETTINGS.context_tokens, LLM_HIDDEN)), inputs)


def test_norms_learn_from_images_whose_embedding_is_frozen() -> None:
    """On a CPU the backward of torch's norm crashes on channels-last features that need no gradient."""
    gradients = []
    for is_frozen in (False, True):
        modules = build(SETTINGS)
        modules[1].requires_grad_(not is_frozen)
        generator = torch.Generator().manual_seed(1)
        images = [torch.randn(SETTINGS.channels, 8, 8, generator=generator)] * 2
        inputs = GeneratorInput((8, 8), (8, 8), patches_of(images, 1), torch.tensor([3, 700]))
        context = torch.randn(2 * SETTINGS.context_tokens, LLM_HIDDEN, generator=generator)
        run(modules, GeneratorState(context), inputs).square().sum().backward()
        gradients.append(modules[2].norm1.weight.grad)
    torch.testing.assert_close(*gradients)
