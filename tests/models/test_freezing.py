"""Parameter names known without modules, and patterns over them."""

import pytest
from torch import Tensor

from mmtrain.errors import RecipeError
from mmtrain.models.shapes.freezing import parameter_names
from mmtrain.models.shapes.layer_shape import BLOCK_KINDS
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.encoder_settings import ProjectorSettings
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.models.factory import (
    CONVOLVED,
    MERGED,
    PIXTRAL,
    POOLED,
    RESAMPLED,
    SHARED_KV,
    STANDARDIZED,
    TWO_KINDS,
    images,
    settings,
    shape_of,
    stage,
    text,
)

SPEECH = AudioSettings(layers=1, hidden=16, heads=2, ffn=24, mel_bins=8, max_frames=16)
MODELS = {
    "plain": settings(),
    "all biases": settings(
        vision={"class_token": True, "pre_norm": True, "projector": {"norm": True}}, llm={"qkv_bias": True}
    ),
    "clip, tied": settings(
        vision={"positions": "grid", "post_norm": False, "patch_bias": False, "qkv_bias": False},
        llm={"tie_embeddings": True, "qk_norm": True, "post_norms": True},
    ),
    "joined tiles": settings(vision={"join_tiles": True}),
    "pooled": settings(vision=POOLED),
    "merged": settings(vision=MERGED),
    "pixtral": settings(vision=PIXTRAL),
    "standardized": settings(vision=STANDARDIZED),
    "resampled": settings(vision=RESAMPLED),
    "shared keys and values": settings(llm=SHARED_KV),
    "keys as values": settings(llm=TWO_KINDS),
    "speech": ModelSettings(audio=SPEECH, llm=settings().llm),
    "averages, one linear": ModelSettings(
        audio=SPEECH.model_copy(update={"pooling": "mean", "projector": ProjectorSettings(kind="linear")}),
        llm=settings().llm,
    ),
    "convolved": settings(audio=CONVOLVED),
    "learned positions": ModelSettings(audio=SPEECH.model_copy(update={"positions": "learned"}), llm=settings().llm),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_names_equal_those_of_the_modules(name: str) -> None:
    model = MODELS[name]
    for unit in shape_of(model).units:
        module = stage(model, unit.name)
        for index, layer in enumerate(unit.layers):
            names_in_module = {n for n, _ in module.layers[str(index)].named_parameters()}
            assert set(parameter_names(layer, getattr(model, unit.name))) == names_in_module, (unit.name, index)


def test_a_pattern_freezes_its_parameters_and_a_layer_trains_with_any_trainable_parameter() -> None:
    patterns = ("llm.layers.[01].*", "llm.layers.2.mlp.*", "vision.layers.0.proj.weight")
    model = settings(llm={"qkv_bias": True})
    shape = shape_of(model, patterns)
    assert [layer.trainable for layer in shape.unit("llm").layers] == [False, False, True, True, True]
    assert all(layer.trainable for layer in shape.unit("vision").layers)
    assert shape.unit("llm").first_trainable == 2
    for unit in shape.units:
        frozen = {n for n, p in stage(model, unit.name, freeze=patterns).named_parameters() if not p.requires_grad}
        expected = {
            "llm": lambda n: n.startswith(("layers.0.", "layers.1.", "layers.2.mlp.")),
            "vision": lambda n: n == "layers.0.proj.weight",
        }[unit.name]
        assert frozen == {n for n, _ in stage(model, unit.name).named_parameters() if expected(n)}


def test_equal_layers_stay_one_object() -> None:
    first, second = shape_of(settings()).unit("llm").layers[1:3]
    assert first is second


def test_a_tied_head_trains_while_the_embedding_does() -> None:
    tied = settings(llm={"tie_embeddings": True})
    assert shape_of(tied, ["llm.layers.4.norm.weight"]).unit("llm").layers[4].trainable
    assert not shape_of(tied, ["llm.layers.[04].*"]).unit("llm").layers[4].trainable


def test_a_pattern_that_matches_nothing_names_the_closest_parameters() -> None:
    with pytest.raises(RecipeError, match=r"^train\.freeze\.1: llm\.layer\.0\.\* matches no .*llm\.layers\.0\.table"):
        shape_of(settings(), ["llm.*", "llm.layer.0.*"])


@pytest.mark.parametrize(
    ("freeze", "refused"),
    [
        ((), None),
        (("llm.*router*",), None),
        (("llm.layers.2.mlp.router.weight",), "router"),
        (("llm.layers.1.mlp.experts.*",), "experts"),
        (("llm.layers.1.mlp.experts.[0-2].*",), None),
    ],
)
def test_a_selection_bias_is_updated_only_beside_a_router_and_experts_that_train(
    freeze: tuple[str, ...], refused: str | None
) -> None:
    moe = {"experts": 4, "top_k": 2, "ffn": 8, "selection_bias": True, "selection_bias_rate": 0.01}
    model = settings(llm={"moe": moe})
    if refused is not None:
        with pytest.raises(RecipeError, match=rf"^model\.llm\.moe\.selection_bias_rate: .* the {refused} that llm"):
            shape_of(model, freeze)
        return
    updates = {block.mlp.router.updates_bias for block in shape_of(model, freeze).unit("llm").layers[1:4]}
    assert updates == {freeze != ("llm.*router*",)}
    assert "layers.1.mlp.router.selection.bias" not in trained(model, freeze)


def trained(model: ModelSettings, freeze: tuple[str, ...]) -> set[str]:
    return {name for name, param in stage(model, "llm", freeze=freeze).named_parameters() if param.requires_grad}


@pytest.mark.parametrize("pattern", ["*.weight", "*.bias", "*norm*", "*linear_qkv.weight", "*.linear_1.weight"])
def test_freezing_some_parameters_leaves_the_gradients_of_others_unchanged(pattern: str) -> None:
    model = MODELS["all biases"]

    def run(freeze: tuple[str, ...]) -> dict[str, Tensor]:
        vision, llm = (stage(model, unit, freeze=freeze) for unit in ("vision", "llm"))
        features = vision(None, images((4, 4)))
        loss = llm(None, text(8, 9, places=(1, 2, 3, 4)), {"vision": features})
        loss.backward()
        grads = {}
        for module in (vision, llm):
            trained = {n: p.grad for n, p in module.named_parameters() if p.requires_grad}
            grads |= {f"{module.unit}.{n}": grad for n, grad in trained.items()}
        return grads

    whole, part = run(()), run((pattern,))
    assert 0 < len(part) < len(whole)
    for name, gradient in part.items():
        assert gradient is not None, f"{name} has no gradient"
        assert (gradient - whole[name]).norm() <= 1e-5 * (whole[name].norm() + 1e-6), name


@pytest.mark.parametrize(
    ("adapted", "expected"), [(None, False), ("llm.*.linear_qkv", False), ("llm.*.linear_fc2", True)]
)
def test_activation_functions_run_again_only_where_a_gradient_reads_their_output(
    adapted: str | None, expected: bool
) -> None:
    parallel = {unit: {"recompute_activation_function": True} for unit in ("vision", "llm")}
    lora = None if adapted is None else {"targets": (adapted,)}
    shape = shape_of(settings(llm={"freeze": True}), lora=lora, parallel=parallel)
    llm_blocks = [layer for layer in shape.unit("llm").layers if layer.kind in BLOCK_KINDS]
    assert {block.recomputes_activation for block in llm_blocks} == {expected}
    vision_blocks = [layer for layer in shape.unit("vision").layers if layer.kind in BLOCK_KINDS]
    assert {block.recomputes_activation for block in vision_blocks} == {lora is None}  # adapters freeze all else
