"""The memory rule, by hand on small cases and against what autograd really saves."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.costs import AnalyticCosts, HeldLayers, TokenLoad, parameters, preset, rank_memory
from mmtrain.costs.memory import MARGIN
from mmtrain.models.shape import LayerShape
from tests.models.factory import clips, images, settings, shape_of, stage, text

COSTS = AnalyticCosts(preset("cpu-core"), "fp32")
LENGTHS = (90, 120, 60, 100)
CLIPS = (60, 80, 20)
IMAGES = ((6, 6), (4, 6), (6, 4), (2, 2))


def held(layers: tuple[LayerShape, ...], dp: int = 1, in_flight: int = 1, recompute: bool = False) -> HeldLayers:
    again, needed = (recompute,) * len(layers), (True,) * len(layers)
    return HeldLayers(layers, needed, again, 1, dp, in_flight, TokenLoad.of(np.array(LENGTHS)))


def test_every_kind_is_counted_by_hand() -> None:
    llm = shape_of(settings()).unit("llm").layers
    blocks = llm[1:3]
    found = rank_memory([held(blocks, dp=4, in_flight=3)], COSTS, "fp32", tied=False)
    count = sum(map(parameters, blocks))
    kept = sum(COSTS.activation_bytes(layer, 1, TokenLoad.of(np.array(LENGTHS)), False) for layer in blocks)
    assert found.parameters == found.gradients == 4 * count
    assert found.optimizer == 8 * count / 4
    assert found.activations == 3 * kept
    assert found.margin == pytest.approx(MARGIN * (found.total - found.margin))
    assert found.binding == "activations"


def test_mixed_precision_adds_a_master_weight() -> None:
    layers = shape_of(settings()).unit("llm").layers[1:2]
    found = rank_memory([held(layers)], AnalyticCosts(preset("h100-80g"), "bf16"), "bf16", tied=False)
    count = parameters(layers[0])
    assert (found.parameters, found.gradients, found.optimizer) == (2 * count, 4 * count, 12 * count)


def test_a_frozen_unit_has_weights_only() -> None:
    frozen = shape_of(settings(llm={"freeze": True})).unit("llm").layers[1:2]
    found = rank_memory([held(frozen)], COSTS, "fp32", tied=False)
    assert found.gradients == found.optimizer == 0 < found.parameters


def test_tied_embeddings_are_held_once_where_both_ends_meet() -> None:
    llm = shape_of(settings(llm={"tie_embeddings": True})).unit("llm").layers
    real = sum(p.numel() for p in stage(settings(llm={"tie_embeddings": True}), "llm").parameters())
    assert rank_memory([held(llm)], COSTS, "fp32", tied=True).parameters == 4 * real
    apart = rank_memory([held(llm[2:])], COSTS, "fp32", tied=True).parameters
    last = stage(settings(llm={"tie_embeddings": True}), "llm", (2, len(llm)))
    assert apart == 4 * sum(p.numel() for p in last.parameters())


def test_recomputing_keeps_less() -> None:
    blocks = shape_of(settings()).unit("llm").layers[1:4]
    kept, again = (rank_memory([held(blocks, 1, 4, r)], COSTS, "fp32", tied=False) for r in (False, True))
    assert again.activations < 0.2 * kept.activations
    assert again.total < kept.total


def saved_bytes(module: torch.nn.Module, hidden: Tensor | None, run: object) -> int:
    """Bytes of distinct storages that autograd saves, parameters left out."""
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(hidden)  # type: ignore[operator]
    return sum(s.nbytes() for s in storages.values())


@pytest.mark.parametrize("unit", ["vision", "audio", "llm"])
def test_activation_bytes_are_those_that_autograd_saves(unit: str) -> None:
    model = settings(
        vision={"hidden": 96, "ffn": 256},
        llm={"hidden": 128, "kv_heads": 4, "ffn": 320, "vocab": 512},
        audio={"hidden": 96, "ffn": 256, "mel_bins": 40},
    )
    module = stage(model, unit)
    if unit == "vision":
        inputs, load = images(*IMAGES), TokenLoad.of(np.array([r * c for r, c in IMAGES]))
    elif unit == "audio":
        inputs, load = clips(*CLIPS, bins=40), TokenLoad.of(np.array(CLIPS) // 2)
    else:
        inputs, load = text(*LENGTHS), TokenLoad.of(np.array(LENGTHS))
    layers = shape_of(model).unit(unit).layers
    real = saved_bytes(module, None, lambda hidden: module(hidden, inputs, {}))
    predicted = sum(COSTS.activation_bytes(layer, 1, load, False, input_grad=i > 0) for i, layer in enumerate(layers))
    # Layers share the tensor between them, which the model counts with both: it must not count less than there is.
    assert 1.0 <= predicted / real <= 1.1
