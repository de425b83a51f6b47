"""The weights that Muon trains, as shapes and as modules."""

from typing import Any

import pytest

from mmtrain.models.shapes.weight_matrices import weight_matrices
from tests.models.factory import DEEPSTACK, MERGED, POOLED, RESAMPLED, SCALED, WINDOWED, settings, stage

MOE = {"experts": 4, "top_k": 2, "ffn": 16, "dense_blocks": (0,), "shared_ffn": 20, "shared_gate": True}
DELTA = {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "taps": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain llm": ("llm", {}),
    "gates of attention": ("llm", {"llm": {"attention_gate": True, "kv_heads": 1}}),
    "mixture": ("llm", {"llm": {"moe": MOE}}),
    "delta nets": ("llm", {"llm": {"delta_net": DELTA, "full_attention_blocks": (1,)}}),
    "plain encoder": ("vision", {}),
    "deepstack": ("vision", {"vision": DEEPSTACK}),
    "windows": ("vision", {"vision": WINDOWED}),
    "linear projector": ("vision", {"vision": POOLED}),
    "layer scale": ("vision", {"vision": SCALED}),
    "merger": ("vision", {"vision": MERGED}),
    "resampler": ("vision", {"vision": RESAMPLED}),
    "audio": ("audio", {"audio": {}}),
}
# What AdamW trains although it has two dimensions, by the ends of names.
LEFT_TO_ADAMW = (
    "table.weight", "output.weight", "layers.0.proj.weight", "conv1.weight", "conv2.weight", "positions", "taps",
    "router.weight", "shared_gate.weight", "queries", "downsample.weight", "class_token", "class_position",
)  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_shapes_of_matrices_are_those_of_modules(model: str) -> None:
    unit, changes = MODELS[model]
    built = stage(settings(**changes), unit)
    params = dict(built.named_parameters())
    trained: set[str] = set()
    for index, layer in enumerate(built.shape.layers):
        for linear, matrices in weight_matrices(layer).items():
            name = f"layers.{index}.{linear}.weight"
            assert tuple(params[name].shape) == (sum(rows for rows, _ in matrices.shapes), matrices.inputs), name
            assert params[name].numel() == matrices.num_weights
            trained.add(name)
    left = {name for name, param in params.items() if param.ndim > 1} - trained
    assert trained
    assert [name for name in left if not name.endswith(LEFT_TO_ADAMW)] == []


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    [first, *_] = (
        weight_matrices(layer)["self_attention.linear_qkv"]
        for layer in stage(settings(), "llm").shape.layers
        if layer.kind == "decoder_block"
    )
    assert first.shapes == ((48, 48), (24, 48), (24, 48))  # 4 heads and 2 KV heads of 12
