"""The diffusion transformer against `diffusers`' PixArt: outputs and gradients, for images of equal and other sizes."""

import pytest
import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor

from mmtrain.costs import layer_arithmetic
from mmtrain.models.shapes.generator_shapes import generator_layers, generator_parameters
from mmtrain.models.stage.generator_input import (
    GeneratorContext,
    GeneratorInput,
    GeneratorState,
    join_state,
    split_state,
)
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.presets import GENERATOR_PRESETS
from tests.models.generator.tiny import (
    CPU,
    DIT,
    LLM_HIDDEN,
    assert_equal_gradients,
    build,
    images_of,
    load,
    patches_of,
    relative_error,
    run,
    shuffle,
)

SETTINGS = GeneratorSettings(**DIT)
EQUAL_SIZES = [(4, 4), (4, 4), (4, 4)]  # in patches
MIXED_SIZES = [(2, 5), (4, 4), (2, 5), (3, 1)]


def reference_model(seed: int = 0) -> PixArtTransformer2DModel:
    torch.manual_seed(seed)
    (width,), (heads,) = SETTINGS.widths, SETTINGS.heads
    model = PixArtTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        in_channels=SETTINGS.channels,
        out_channels=2 * SETTINGS.channels,
        num_layers=SETTINGS.layers,
        cross_attention_dim=SETTINGS.context_width,
        sample_size=SETTINGS.sample_size,
        patch_size=SETTINGS.patch,
        use_additional_conditions=False,
    )
    shuffle(model)
    return model


def random_inputs(sizes: list[tuple[int, int]], seed: int = 1) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return noisy images (C, H, W), timesteps and the context (images, context tokens, context_width)."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.randn(SETTINGS.channels, 2 * r, 2 * c, generator=generator) for r, c in sizes]
    timesteps = torch.randint(0, 1000, (len(sizes),), generator=generator)
    context = torch.randn(len(sizes), SETTINGS.context_tokens, SETTINGS.context_width, generator=generator)
    return images, timesteps, context


def as_input(images: list[Tensor], timesteps: Tensor) -> GeneratorInput:
    patch = SETTINGS.patch
    rows = tuple(image.shape[1] // patch for image in images)
    cols = tuple(image.shape[2] // patch for image in images)
    return GeneratorInput(rows, cols, patches_of(images, patch), timesteps)


@pytest.mark.parametrize("sizes", [EQUAL_SIZES, MIXED_SIZES], ids=["equal sizes", "mixed sizes"])
def test_outputs_and_gradients_equal_those_of_diffusers(sizes: list[tuple[int, int]]) -> None:
    """Images of mixed sizes are packed here and run one by one there."""
    theirs = reference_model()
    ours = build(SETTINGS)
    load(ours, theirs.state_dict(), SETTINGS)
    images, timesteps, context = random_inputs(sizes)
    their_context, our_context = (context.clone().requires_grad_() for _ in range(2))
    expected = [
        theirs(image[None], their_context[i : i + 1], timesteps[i : i + 1], return_dict=False)[0][0]
        for i, image in enumerate(images)
    ]
    packed = run(ours[1:], GeneratorState(our_context.flatten(0, 1)), as_input(images, timesteps))
    outputs = images_of(packed, sizes, SETTINGS.patch)
    for ours_of_image, theirs_of_image in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours_of_image, theirs_of_image, atol=1e-4, rtol=1e-4)

    weights = [torch.randn(image.shape, generator=torch.Generator().manual_seed(2)) for image in expected]
    sum((out * weight).sum() for out, weight in zip(expected, weights, strict=True)).backward()  # type: ignore[union-attr]
    sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
    assert relative_error(our_context.grad, their_context.grad) < 1e-3  # type: ignore[arg-type]
    assert_equal_gradients(ours, theirs, SETTINGS)


def test_shapes_count_the_parameters_of_the_modules() -> None:
    for layer, module in zip(generator_layers(SETTINGS, LLM_HIDDEN), build(SETTINGS), strict=True):
        params = dict(module.named_parameters())
        assert layer_arithmetic.num_parameters(layer) == sum(p.numel() for p in params.values()), layer.kind
        assert set(generator_parameters(layer)) == set(params), layer.kind


def test_the_parameters_of_pixart_are_those_of_diffusers() -> None:
    settings = GeneratorSettings(**GENERATOR_PRESETS["pixart-alpha"].settings)
    with torch.device("meta"):
        model = PixArtTransformer2DModel(
            cross_attention_dim=settings.context_width, sample_size=64, use_additional_conditions=False
        )
    layers = generator_layers(settings, LLM_HIDDEN)[1:]
    assert sum(map(layer_arithmetic.num_parameters, layers)) == model.num_parameters()


def test_a_stage_receives_what_its_layers_read() -> None:
    """Cut before each layer: outputs are the same, and what passes has the size that the planner counts."""
    modules = build(SETTINGS)
    images, timesteps, _ = random_inputs(MIXED_SIZES)
    inputs = as_input(images, timesteps)
    rows = torch.randn(len(images) * SETTINGS.context_tokens, LLM_HIDDEN, generator=torch.Generator().manual_seed(3))
    context = GeneratorContext(inputs, CPU)
    whole = run(modules, GeneratorState(rows), inputs)
    state = GeneratorState(rows)
    for index, (layer, module) in enumerate(zip(generator_layers(SETTINGS, LLM_HIDDEN), modules, strict=True)):
        if index:
            joined = join_state(state, layer)
            assert joined.numel() == layer.input_elements(context.num_tokens, context.num_images)
            state = split_state(joined, layer, context.num_tokens, context.num_images)
        state = module(state, context)
    assert state.hidden is not None
    assert torch.equal(state.hidden, whole)


def test_a_microbatch_without_images_gives_every_parameter_a_zero_gradient() -> None:
    modules = build(SETTINGS)
    inputs = GeneratorInput((), (), torch.empty(0, 16), torch.empty(0))
    out = run(modules, GeneratorState(torch.empty(0, LLM_HIDDEN)), inputs)
    assert out.shape == (0, 2 * SETTINGS.channels * SETTINGS.patch**2)
    out.sum().backward()
    for name, param in modules.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name
