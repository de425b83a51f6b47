"""The arithmetic of layers against the real modules: parameters of each layer, FLOPs by torch's counter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmtrain.costs import TokenLoad
from mmtrain.costs import layer_arithmetic as analytic
from mmtrain.costs.block_arithmetic import mixer_arithmetic
from mmtrain.models.shapes.layer_shape import MoeMlp
from mmtrain.models.shapes.model_shape import LayerShape, ModelShape
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.models.factory import (
    CONVOLVED,
    DEEPSTACK,
    MERGED,
    PIXTRAL,
    POOLED,
    RESAMPLED,
    SCALED,
    SHARED_KV,
    STANDARDIZED,
    TWO_KINDS,
    WINDOWED,
    clips,
    images,
    load_of_text,
    settings,
    shape_of,
    stage,
    text,
)

IMAGES = ((4, 6), (2, 2), (6, 4))
TEXTS = (9, 12, 15)
CLIPS = (12, 4, 20)
CHUNKS = (48, 24, 24)  # frames of clips of whole chunks
PLACES = (1, 2, 3, 4, 5, 6, 13, 22, 23, 24, 25, 26, 27)

GROUPED = {
    "experts": 6, "top_k": 2, "ffn": 24, "scores": "sigmoid", "selection_bias": True, "groups": 3, "top_groups": 2,
    "shared_ffn": 40, "shared_gate": True, "dense_blocks": (0,),
}  # fmt: skip
MODELS = {
    "plain": settings(),
    "clip": settings(
        vision={
            "class_token": True,
            "pre_norm": True,
            "post_norm": False,
            "positions": "grid",
            "patch_bias": False,
            "qkv_bias": False,
            "projector": {"norm": True},
        },
        llm={"qkv_bias": True},
    ),
    "gelu": settings(llm={"mlp": "gelu"}),
    "normalized outputs": settings(llm={"post_norms": True, "zero_centered_norms": True, "mlp": "geglu"}),
    "normalized heads": settings(llm={"qk_norm": True, "head_dim": 16}),
    "two kinds of attention": settings(llm=TWO_KINDS | {"window": 64}),
    "shared keys and values": settings(llm=SHARED_KV | {"window": 64}),
    "pooled": settings(vision=POOLED),
    "merged": settings(vision=MERGED),
    "pixtral": settings(vision=PIXTRAL),
    "standardized": settings(vision=STANDARDIZED),
    "resampled": settings(vision=RESAMPLED),
    "resampled, raw tokens": settings(vision=RESAMPLED | {"freeze": True, "post_norm": False}),
    "experts": settings(llm={"moe": {"experts": 5, "top_k": 2, "ffn": 24, "dense_blocks": (1,)}}),
    "experts beside a shared one": settings(llm={"moe": GROUPED}),
    "windows": settings(vision=WINDOWED),
    "scaled": settings(vision=SCALED),
    "deepstack": settings(vision=DEEPSTACK),
    "deepstack, only projectors": settings(vision={**DEEPSTACK, "freeze": True}, llm={"freeze": True}),
    "joined tiles": settings(vision={"join_tiles": True}),
    "frozen_encoder": settings(vision={"freeze": True}),
    "frozen_llm": settings(llm={"freeze": True}),
    "only_projector": settings(vision={"freeze": True}, llm={"freeze": True}),
}
SPEECH = {
    "plain": settings(audio={}),
    "learned": settings(audio={"positions": "learned", "downsample": 1, "projector": {"norm": True}}),
    "frozen_encoder": settings(audio={"freeze": True}),
    "averages": settings(audio={"pooling": "mean", "projector": {"kind": "linear"}}),
    "convolved": settings(audio=CONVOLVED),
}
EMBEDS = ("patch_embed", "audio_embed")  # not split by tensor parallelism
UNITS = [(model, unit) for model in MODELS.values() for unit in ("vision", "llm")]
UNITS += [(model, "audio") for model in SPEECH.values()]
NAMES = [f"{unit}-{name}" for name in MODELS for unit in ("vision", "llm")] + [f"audio-{name}" for name in SPEECH]


def load_of(model: ModelSettings, unit: str) -> TokenLoad:
    if unit == "llm":
        return load_of_text(text(*TEXTS))
    if unit == "audio":
        assert model.audio is not None
        is_cut = model.audio.chunk is not None
        return TokenLoad.of(np.array(CHUNKS if is_cut else CLIPS) // model.audio.cells_per_token)
    assert model.vision is not None
    return TokenLoad.of(np.array([r * c + model.vision.class_token for r, c in IMAGES]))


def without_mask(shape: ModelShape, unit: str) -> list[LayerShape]:
    """Return the unit's layers without causal masks, since torch's counter counts all pairs."""
    layers = shape.unit(unit).layers
    return [replace(layer, mixer=layer.mixer and replace(layer.mixer, causal=False)) for layer in layers]


def counted_flops(model: ModelSettings, unit: str) -> tuple[int, int]:
    """Return the FLOPs of forward and of backward by torch's counter."""
    module = stage(model, unit, attention="sdpa")
    features: dict[str, Tensor] = {}
    if unit == "llm":
        trains = shape_of(model).unit("vision").first_trainable is not None
        width = shape_of(model).edge("vision", "llm").width
        features = {"vision": torch.randn(len(PLACES), width, requires_grad=trains)}
    clip_frames = CHUNKS if model.audio is not None and model.audio.chunk is not None else CLIPS
    inputs = {"llm": text(*TEXTS, places=PLACES), "vision": images(*IMAGES), "audio": clips(*clip_frames)}[unit]
    with sdpa_kernel(SDPBackend.MATH):  # the counter knows no fused attention on a CPU
        with FlopCounterMode(display=False) as forward:
            out = module(None, inputs, features)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("model", "unit"), UNITS, ids=NAMES)
def test_parameters_are_exact_for_every_layer(model: ModelSettings, unit: str) -> None:
    module = stage(model, unit)
    for index, layer in enumerate(shape_of(model).unit(unit).layers):
        real = sum(p.numel() for p in module.layers[str(index)].parameters())
        assert analytic.num_parameters(layer) == real, layer


@pytest.mark.parametrize(("model", "unit"), UNITS, ids=NAMES)
def test_flops_equal_those_torch_counts(model: ModelSettings, unit: str) -> None:
    shape = shape_of(model)
    load = load_of(model, unit)
    layers = without_mask(shape, unit)
    needs = analytic.input_grad_needed(shape)[unit]
    forward = sum(analytic.forward_flops(layer, load) for layer in layers)
    backward = sum(
        analytic.backward_flops(layer, load, weight_grad=layer.trainable, input_grad=needed)
        for layer, needed in zip(layers, needs, strict=True)
    )
    of_weights = weight_gradient_flops(shape, unit, load)
    assert (forward, backward + of_weights) == counted_flops(model, unit)


def weight_gradient_flops(shape: ModelShape, unit: str, load: TokenLoad) -> int:
    """Return what torch counts for gradients of experts' weights, which are GEMMs there and memory traffic here."""
    mixtures = [layer.mlp for layer in shape.unit(unit).layers if isinstance(layer.mlp, MoeMlp)]
    return sum(2 * load.tokens * mlp.top_k * mlp.expert_ffn for mlp in mixtures)


def test_a_causal_mask_halves_the_pairs() -> None:
    layer = next(x for x in shape_of(settings()).unit("llm").layers if x.kind == "decoder_block")
    lengths = np.array([1, 5, 8])
    pairs = sum(n * (n + 1) // 2 for n in lengths.tolist())
    assert analytic.attention_flops(layer, TokenLoad.of(lengths)) == 4 * pairs * layer.attention.inner_width


@pytest.mark.parametrize("length", [3, 8, 9, 40])
def test_a_window_bounds_the_pairs_of_a_token(length: int) -> None:
    layer = shape_of(settings(llm={"window": 8})).unit("llm").layers[1]
    pairs = 3 * sum(min(position + 1, 8) for position in range(length))
    flops = analytic.attention_flops(layer, TokenLoad.of(np.array([length] * 3)))
    assert flops == 4 * pairs * layer.attention.inner_width


@pytest.mark.parametrize(
    ("lengths", "tolerance"), [([2, 5, 11, 30, 64], 0.03), ([400, *[10] * 40], 1e-9), ([3, 3, 8, 5], 1e-9)]
)
def test_windows_of_unequal_sequences_cost_about_what_they_compute(lengths: list[int], tolerance: float) -> None:
    layer = shape_of(settings(llm={"window": 8})).unit("llm").layers[1]
    pairs = sum(min(position + 1, 8) for length in lengths for position in range(length))
    flops = analytic.attention_flops(layer, TokenLoad.of(np.array(lengths)))
    assert flops / (4 * layer.attention.inner_width) == pytest.approx(pairs, rel=tolerance)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.integers(1, 60), st.floats(0.3, 3))
def test_pairs_inside_a_window_are_at_most_those_of_all_tokens(lengths: list[int], window: int, scale: float) -> None:
    """Loads that were scaled, as the balancing of steps does, have no lengths that make them up."""
    block = shape_of(settings(llm={"window": 8})).unit("llm").layers[1]
    block = replace(block, mixer=replace(block.attention, window=window))
    load = TokenLoad.of(np.array(lengths))
    pairs = mixer_arithmetic(block).query_key_pairs(load)
    assert load.tokens <= pairs <= min(load.tokens * window, (load.sum_sq + load.tokens) // 2)
    scaled = replace(load, sum_sq=round(load.sum_sq * scale))
    assert (
        0
        <= mixer_arithmetic(block).query_key_pairs(scaled)
        <= max(load.tokens * window, (scaled.sum_sq + load.tokens) // 2)
    )


def test_model_flops_count_only_needed_gradients() -> None:
    loads = {"vision": load_of(MODELS["plain"], "vision"), "llm": load_of(MODELS["plain"], "llm")}
    forward = sum(
        analytic.forward_flops(layer, loads[u.name]) for u in shape_of(settings()).units for layer in u.layers
    )
    all_trained = analytic.model_flops(shape_of(MODELS["plain"]), loads)
    frozen_encoder = analytic.model_flops(shape_of(MODELS["frozen_encoder"]), loads)
    frozen = shape_of(settings(vision={"freeze": True, "projector": {"freeze": True}}, llm={"freeze": True}))
    assert 2.5 * forward < all_trained < 3 * forward
    assert frozen_encoder < all_trained
    assert analytic.model_flops(frozen, loads) == forward


@pytest.mark.parametrize("tp", [1, 2])
def test_tensor_parallel_ranks_share_parameters_and_work(tp: int) -> None:
    for unit in shape_of(settings(audio={})).units:
        for layer in unit.layers:
            load = TokenLoad.of(np.array([8, 16]))
            whole = analytic.forward_flops(layer, load)
            assert analytic.forward_flops(layer, load, tp) == (whole if layer.kind in EMBEDS else whole // tp)
            assert (
                analytic.num_parameters(layer) / tp
                <= analytic.num_parameters(layer, tp)
                <= analytic.num_parameters(layer)
            )


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_context_parallel_ranks_share_tokens_and_pairs(cp: int) -> None:
    whole = TokenLoad.of(np.array([16, 48, 8]))
    share = analytic.context_parallel_load(whole, cp)
    for layer in shape_of(settings(llm={"kv_heads": 2})).unit("llm").layers:
        assert cp * analytic.forward_flops(layer, share) == analytic.forward_flops(layer, whole)
        exchanged = replace(whole, exchanged=whole.tokens)
        assert cp * analytic.activation_bytes(layer, share, 2) == analytic.activation_bytes(layer, exchanged, 2)


def test_every_layer_saves_at_least_its_input_unless_that_is_the_steps_data() -> None:
    load = TokenLoad.of(np.array([8, 16]))
    for unit in shape_of(settings(audio={})).units:
        for layer in unit.layers:
            assert analytic.input_bytes(layer, load, 2) <= analytic.activation_bytes(layer, load, 2)
            reads_data = layer.kind in ("patch_embed", "audio_embed", "embedding")
            assert (analytic.input_bytes(layer, load, 2) == 0) == reads_data
