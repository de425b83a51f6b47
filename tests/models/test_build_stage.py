import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.layer_shape import BLOCK_PIECES
from mmtrain.models.stage.piecewise import run_block_pieces
from mmtrain.models.stage.stage_inputs import EncoderInput, TextInput
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe.settings.model_settings import ModelSettings
from tests.models.factory import (
    CPU,
    DEEPSTACK,
    SHARED_KV,
    gradients,
    images,
    randomize,
    settings,
    shape_of,
    stage,
    text,
)
from tests.models.whole_tensors import stage_logits

IMAGES = ((4, 6), (2, 2), (6, 4))  # 6 + 1 + 6 features
PLACES = (1, 2, 3, 4, 5, 6, 13, 22, 23, 24, 25, 26, 27)
LENGTHS = (9, 12, 15)


def _run(stages: list[StageModule], inputs: EncoderInput | TextInput, features: dict[str, Tensor]) -> Tensor:
    """Run stages one after another, cutting the graph between them as the runtime does."""
    hidden: Tensor | None = None
    boundaries = []
    for module in stages:
        received = None if hidden is None else hidden.detach().requires_grad_()
        hidden = module(received, inputs, features)
        boundaries.append((received, hidden))
    assert hidden is not None
    gradient = torch.ones_like(hidden) if hidden.ndim == 0 else torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
    for received, output in reversed(boundaries):
        torch.autograd.backward(output, gradient)
        if received is not None:
            assert received.grad is not None
            gradient = received.grad
    return hidden


def _inputs(unit: str, model: ModelSettings | None = None) -> tuple[EncoderInput | TextInput, dict[str, Tensor]]:
    if unit == "vision":
        return images(*IMAGES), {}
    width = shape_of(model or settings()).edge("vision", "llm").width
    features = torch.randn(len(PLACES), width, generator=torch.Generator().manual_seed(5)).requires_grad_()
    return text(*LENGTHS, places=PLACES), {"vision": features}


def _outcome(
    model: ModelSettings, unit: str, cuts: tuple[int, ...], recompute: frozenset[int] = frozenset()
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """Return output, gradients by global name and the features' gradient, with layers cut at `cuts`."""
    ends = (0, *cuts, len(shape_of(model).unit(unit).layers))
    stages = [stage(model, unit, span, recompute=recompute) for span in itertools.pairwise(ends)]
    inputs, features = _inputs(unit, model)
    output = _run(stages, inputs, features)
    gradient_sums: dict[str, Tensor] = {}
    for module in stages:
        for name, gradient in gradients(module).items():
            gradient_sums[name] = gradient_sums[name] + gradient if name in gradient_sums else gradient
    return output, gradient_sums, features["vision"].grad if features else None


@pytest.mark.parametrize(
    ("model", "unit"),
    [
        (settings(vision={"class_token": True, "pre_norm": True, "projector": {"norm": True}}), "vision"),
        (settings(), "llm"),
        (settings(vision=DEEPSTACK), "vision"),
        (settings(vision=DEEPSTACK), "llm"),
        (settings(llm=SHARED_KV), "llm"),
    ],
    ids=["vision", "llm", "deep vision", "deep llm", "shared keys and values"],
)
def test_stages_cut_anywhere_compose_to_the_whole(model: ModelSettings, unit: str) -> None:
    num_layers = len(shape_of(model).unit(unit).layers)
    expected, expected_gradients, expected_features = _outcome(model, unit, ())
    every_cut = [(c,) for c in range(1, num_layers)]
    for cuts in (*every_cut, tuple(range(1, num_layers))):
        output, result_gradients, features = _outcome(model, unit, cuts)
        assert torch.equal(output, expected), cuts
        assert result_gradients.keys() == expected_gradients.keys()
        for name in result_gradients:
            torch.testing.assert_close(result_gradients[name], expected_gradients[name], rtol=1e-5, atol=1e-7)
        if features is not None:
            torch.testing.assert_close(features, expected_features)


@pytest.mark.parametrize("llm", [{}, {"post_norms": True, "zero_centered_norms": True, "window": 5}])
def test_a_block_in_pieces_equals_the_block(llm: dict[str, Any]) -> None:
    module = stage(settings(llm=llm), "llm", (1, 4))
    randomize(module)
    context = module.context(text(*LENGTHS), {})
    hidden = torch.randn(sum(LENGTHS), 48, generator=torch.Generator().manual_seed(2))
    whole = module.run(context, hidden, range(2, 3))
    for cut in range(1, len(BLOCK_PIECES)):
        state = run_block_pieces(module, context, (hidden,), 2, range(cut))
        (joined,) = run_block_pieces(module, context, state, 2, range(cut, len(BLOCK_PIECES)))
        torch.testing.assert_close(joined, whole)


@pytest.mark.parametrize(
    ("model", "unit", "layers"),
    [
        (settings(vision=DEEPSTACK), "vision", (1, 2)),
        (settings(vision=DEEPSTACK), "llm", (1, 2)),
        (settings(llm=SHARED_KV), "llm", (1, 2, 3, 4)),
    ],
    ids=["encoder", "deepstack", "shared keys and values"],
)
def test_what_travels_beside_the_hidden_states_passes_pieces(
    model: ModelSettings, unit: str, layers: tuple[int, ...]
) -> None:
    """Blocks of the encoder add outputs to what travels, and those of the LLM take tensors out of it or add some."""
    module = stage(model, unit, (layers[0], layers[-1] + 1))
    randomize(module)
    inputs = images(*IMAGES) if unit == "vision" else text(*LENGTHS)
    context = module.context(inputs, {})
    for layer in layers:
        shape = shape_of(model).unit(unit).layers[layer]
        rows = torch.randn(context.num_tokens, shape.in_width, generator=torch.Generator().manual_seed(2))
        whole = module.run(context, rows, range(layer, layer + 1))
        assert whole.shape[1] == shape.out_width
        for cut in range(1, len(BLOCK_PIECES)):
            state = run_block_pieces(module, context, (rows,), layer, range(cut))
            (joined,) = run_block_pieces(module, context, state, layer, range(cut, len(BLOCK_PIECES)))
            torch.testing.assert_close(joined, whole)
    if model.llm.shared_kv is not None:
        kept = shape_of(model).unit(unit).layers[2]
        assert kept.keeps_kv
        assert {side.num_heads for side in kept.side_out} == {0, 1, 2}, "inputs of blocks, and two kinds of heads"


@pytest.mark.parametrize("unit", ["vision", "llm"])
def test_recompute_changes_nothing(unit: str) -> None:
    model = settings(vision=DEEPSTACK)
    expected, expected_gradients, expected_features = _outcome(model, unit, (2,))
    num_layers = len(shape_of(model).unit(unit).layers)
    for recompute in (frozenset({1}), frozenset(range(num_layers))):
        output, result_gradients, features = _outcome(model, unit, (2,), recompute)
        assert torch.equal(output, expected)
        assert all(torch.equal(result_gradients[name], expected_gradients[name]) for name in expected_gradients)
        assert features is None or (expected_features is not None and torch.equal(features, expected_features))


def test_recompute_keeps_fewer_activations() -> None:
    def num_saved_elements(recompute: tuple[int, ...]) -> int:
        num_elements = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal num_elements
            num_elements += 0 if isinstance(x, torch.nn.Parameter) else x.numel()
            return x

        module = stage(settings(), "llm", (1, 4), recompute=recompute)
        hidden = torch.randn(36, 48, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            module(hidden, text(*LENGTHS))
        return num_elements

    nothing, single_layer, everything = num_saved_elements(()), num_saved_elements((2,)), num_saved_elements((1, 2, 3))
    assert everything < single_layer < nothing
    assert nothing - single_layer == pytest.approx((nothing - everything) / 3, rel=0.01)


AGAIN = {"vision": {"recompute_activation_function": True}, "llm": {"recompute_activation_function": True}}


@pytest.mark.parametrize(
    ("unit", "model"),
    [
        ("llm", settings()),
        ("llm", settings(llm={"mlp": "geglu"})),
        ("vision", settings(vision={"activation": "gelu"})),
        ("vision", settings(vision={"activation": "quick_gelu"})),
    ],
    ids=["swiglu", "geglu", "gelu", "quick_gelu"],
)
def test_an_activation_function_that_runs_again_changes_nothing(unit: str, model: ModelSettings) -> None:
    """Autograd does not keep its output, and an adapter on the last linear reads it as well."""
    num_blocks = sum(layer.recomputes_activation for layer in shape_of(model, parallel=AGAIN).unit(unit).layers)
    num_rows = sum(LENGTHS) if unit == "llm" else sum(rows * cols for rows, cols in IMAGES)
    lora: dict[str, Any] = {"rank": 2, "alpha": 4.0, "targets": ("*mlp*",)}
    for adapters in (None, lora):
        inputs, features = _inputs(unit, model)
        modules = [stage(model, unit, lora=adapters, parallel=parallel) for parallel in (None, AGAIN)]
        num_saved = []
        for module in modules:
            randomize(module)
            num_saved.append(_num_saved_elements(module, inputs, features))
        usual, again = (
            {name: param.grad for name, param in module.named_parameters() if param.requires_grad} for module in modules
        )
        assert any("mlp.linear_fc2" in name for name in usual)
        for name, gradient in usual.items():
            torch.testing.assert_close(again[name], gradient, rtol=0, atol=0)
        if adapters is None:  # hooks of the block hide from those of this test what adapters keep
            assert num_blocks > 0
            assert num_saved[0] - num_saved[1] == num_blocks * num_rows * model.unit(unit).ffn


def _num_saved_elements(module: StageModule, inputs: EncoderInput | TextInput, features: dict[str, Tensor]) -> int:
    """Run forward and backward; return how many numbers autograd kept in different tensors, without parameters."""
    sizes: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no storage is given out twice

    def pack(x: Tensor) -> Tensor:
        if not isinstance(x, torch.nn.Parameter):
            sizes[x.untyped_storage()._cdata] = x.numel()
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        _run([module], inputs, features)
    return sum(sizes.values())


def test_packed_sequences_equal_separate_ones() -> None:
    llm = stage(settings(), "llm")
    randomize(llm)
    inputs, features = _inputs("llm")
    assert isinstance(inputs, TextInput)
    packed = llm(None, inputs, features)
    packed.backward()
    expected = gradients(llm)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    llm.zero_grad()
    assert inputs.ids is not None
    assert inputs.labels is not None
    places = inputs.feature_positions["vision"]
    total = torch.zeros(())
    start = 0
    for n in inputs.lengths:
        in_sample = (places >= start) & (places < start + n)
        sample = TextInput(
            (n,), inputs.ids[start : start + n], inputs.labels[start : start + n], {"vision": places[in_sample] - start}
        )
        loss = llm(None, sample, {"vision": features["vision"].detach()[in_sample]})
        loss.backward()
        total += loss.detach()
        start += n
    torch.testing.assert_close(packed, total)
    for name, gradient in gradients(llm).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)


def test_loss_is_the_sum_of_cross_entropies() -> None:
    llm = stage(settings(), "llm")
    randomize(llm)
    inputs, features = _inputs("llm")
    assert isinstance(inputs, TextInput)
    logits = stage_logits(llm, None, inputs, features)
    assert logits.shape == (36, 128)  # 90 rows, padded to a multiple of 64
    assert inputs.labels is not None
    expected = torch.nn.functional.cross_entropy(logits[:, :90], inputs.labels, reduction="sum")
    loss = llm(None, inputs, features)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


def test_features_replace_embeddings_at_their_positions() -> None:
    embedding = stage(settings(), "llm", (0, 1))
    inputs, features = _inputs("llm")
    assert isinstance(inputs, TextInput)
    out = embedding(None, inputs, features)
    places = list(PLACES)
    others = [i for i in range(36) if i not in places]
    assert inputs.ids is not None
    assert torch.equal(out[places], features["vision"])
    assert torch.equal(out[others], embedding.layers["0"].get_parameter("table.weight")[inputs.ids[others]])
    out.sum().backward()
    assert features["vision"].grad is not None
    assert torch.equal(features["vision"].grad, torch.ones(len(places), 48))


@pytest.mark.parametrize("features", [{}, {"vision": torch.zeros(0, 48, requires_grad=True)}])
def test_text_without_images(features: dict[str, Tensor]) -> None:
    llm = stage(settings(), "llm")
    llm(None, text(5, 7), features).backward()
    assert gradients(llm)["llm.layers.0.table.weight"].abs().sum() > 0
    assert all(f.grad is not None for f in features.values())


@pytest.mark.parametrize("recompute", [(), (1, 2)])
def test_a_microbatch_without_images_has_zero_gradients(recompute: tuple[int, ...]) -> None:
    vision = stage(settings(vision={"class_token": True, "pre_norm": True}), "vision", recompute=recompute)
    features = vision(None, images())
    assert features.shape == (0, 48)
    features.backward(torch.zeros(0, 48))
    assert all(gradient.abs().sum() == 0 for gradient in gradients(vision).values())


def test_a_microbatch_without_tokens_has_zero_loss_and_gradients() -> None:
    llm = stage(settings(), "llm")
    loss = llm(None, text(), {"vision": torch.zeros(0, 48)})
    loss.backward()
    assert loss.item() == 0
    assert all(gradient.abs().sum() == 0 for gradient in gradients(llm).values())


def _trainable(model: ModelSettings, unit: str) -> set[str]:
    module = stage(model, unit)
    inputs, features = _inputs(unit)
    out = module(None, inputs, features)
    if out.requires_grad:
        out.sum().backward()
    trainable = {name for name, param in module.named_parameters() if param.requires_grad}
    assert {name for name, param in module.named_parameters() if param.grad is not None} == trainable
    return trainable


def test_freezing() -> None:
    projector = {f"layers.3.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    everything = _trainable(settings(), "vision")
    assert projector < everything
    assert _trainable(settings(vision={"freeze": True}), "vision") == projector
    assert _trainable(settings(vision={"freeze": True, "projector": {"freeze": True}}), "vision") == set()
    assert _trainable(settings(vision={"projector": {"freeze": True}}), "vision") == everything - projector
    assert _trainable(settings(llm={"freeze": True}), "llm") == set()
    assert len(_trainable(settings(), "llm")) == 1 + 3 * 6 + 2


def test_a_frozen_llm_passes_gradients_to_the_features() -> None:
    _, features = _inputs("llm")
    for recompute in ((), (0, 1, 2, 3, 4)):
        llm = stage(settings(llm={"freeze": True}), "llm", recompute=recompute)
        llm(None, _inputs("llm")[0], features).backward()
        assert features["vision"].grad is not None
        assert features["vision"].grad.abs().sum() > 0
        features["vision"].grad = None


def test_tied_embeddings_in_one_stage_are_one_parameter() -> None:
    llm = stage(settings(llm={"tie_embeddings": True}), "llm")
    names = [name for name, _ in llm.named_parameters()]
    assert len(names) == 1 + 3 * 6 + 1
    assert not any("output" in name for name in names)
    assert not any(hasattr(param, "shared") for param in llm.parameters())


def test_tied_embeddings_on_two_stages_have_one_name_and_sum_their_gradients() -> None:
    model = settings(llm={"tie_embeddings": True})
    first, middle, last = (stage(model, "llm", span) for span in ((0, 1), (1, 3), (3, 5)))
    copies = [first.get_parameter("layers.0.table.weight"), last.get_parameter("layers.0.table.weight")]
    assert torch.equal(copies[0], copies[1])
    assert [getattr(param, "shared", None) for param in copies] == ["embeddings", "embeddings"]
    assert not any(hasattr(p, "shared") for m in (first, middle, last) for p in m.parameters() if p.ndim == 1)
    whole = _outcome(model, "llm", ())
    split = _outcome(model, "llm", (1, 3))  # sums gradients of the same name, as ReduceShared does
    assert torch.equal(split[0], whole[0])
    for name in whole[1]:
        torch.testing.assert_close(split[1][name], whole[1][name], rtol=1e-5, atol=1e-6)


def test_text_only_model() -> None:
    """Compare an LLM without encoder with the same LLM on text in a model that has an encoder."""
    inputs = text(*LENGTHS)
    alone = stage(ModelSettings(llm=settings().llm), "llm")(None, replace(inputs, feature_positions={}))
    beside_vision = stage(settings(), "llm")(None, inputs, {"vision": torch.empty(0, 48)})
    assert alone.item() == beside_vision.item() > 0


def test_attention_backends_agree_in_a_model() -> None:
    inputs, features = _inputs("llm")
    losses = [stage(settings(), "llm", attention=name)(None, inputs, features) for name in ("sdpa", "reference")]
    torch.testing.assert_close(losses[0], losses[1])


def test_half_precision_keeps_the_loss_in_fp32() -> None:
    model = settings(vision={"class_token": True})
    shape = shape_of(model)
    groups = ParallelGroups.single()
    options = StageOptions(torch.bfloat16, CPU, seed=1)
    vision, llm = (
        build_stage(model, shape, StageSpec(unit.name, (0, len(unit.layers))), groups, options) for unit in shape.units
    )
    features = vision(None, images(*IMAGES))
    assert features.dtype == torch.bfloat16
    inputs = text(*LENGTHS, places=PLACES)
    loss = llm(None, inputs, {"vision": features})
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(g.dtype == torch.bfloat16 for g in (*gradients(vision).values(), *gradients(llm).values()))
    exact = stage(model, "llm")(None, inputs, {"vision": stage(model, "vision")(None, images(*IMAGES))})
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
