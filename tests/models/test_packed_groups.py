"""The loss of a packed group is the sum over its samples, in any order, for every mixer."""

from functools import cache
from itertools import accumulate
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmtrain.models.shapes.layer_shape import Mixer
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageModule
from tests.models.factory import GROWING, LLM, randomize, settings, shape_of, stage

# Samples above a chunk of a gated DeltaNet, 64 tokens, among shorter ones, empty ones and those of one token.
LENGTHS = (0, 1, 2, 5, 17, 63, 64, 65, 130)
VARIANTS: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention in windows": {"window": 5, "full_attention_blocks": (1,), "qk_norm": True},
    "gated attention, some features turn": {"attention_gate": True, "qk_norm": True, "rope_width": 6},
    "attention whose queries grow": GROWING,
    "gated DeltaNets, attention in one block": {
        "delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 12, "taps": 3},
        "full_attention_blocks": (1,),
    },
}
Sample = tuple[Tensor, Tensor]  # ids and labels


@cache
def _llm(variant: str) -> StageModule:
    llm = stage(settings(llm=VARIANTS[variant]), "llm")
    randomize(llm)
    return llm


@cache
def _sample(length: int) -> Sample:
    generator = torch.Generator().manual_seed(length)
    ids, labels = torch.randint(0, LLM["vocab"], (2, length), generator=generator)
    labels[torch.rand(length, generator=generator) < 1 / 3] = -100
    return ids, labels


def _outcome(variant: str, samples: list[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one group, and the gradients of all parameters."""
    llm = _llm(variant)
    llm.zero_grad()
    ids, labels = (torch.cat(parts) for parts in zip(*samples, strict=True))
    no_places = {"vision": torch.zeros(0, dtype=torch.int64)}
    loss = llm(None, TextInput(tuple(len(of_sample) for of_sample, _ in samples), ids, labels, no_places), {})
    loss.backward()
    return loss.detach(), {name: param.grad.clone() for name, param in llm.named_parameters() if param.grad is not None}


@cache
def _alone(variant: str, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    return _outcome(variant, [_sample(length)])


@pytest.mark.parametrize("variant", VARIANTS)
@given(lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=5).filter(any))
def test_a_group_is_the_sum_of_its_samples(variant: str, lengths: list[int]) -> None:
    """Compare losses and gradients of a drawn order with those of samples that are alone in their groups."""
    loss, gradients = _outcome(variant, [_sample(length) for length in lengths])
    alone = [_alone(variant, length) for length in lengths if length]
    expected: Tensor = sum((of_sample for of_sample, _ in alone), torch.zeros(()))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for name, gradient in gradients.items():
        *_, wanted = accumulate(of_sample[name] for _, of_sample in alone)
        assert (gradient - wanted).norm() <= 1e-4 * max(float(wanted.norm()), 1e-2), name


def test_every_mixer_has_a_variant() -> None:
    mixers = {
        type(layer.mixer) for more in VARIANTS.values() for layer in shape_of(settings(llm=more)).unit("llm").layers
    }
    assert set(get_args(Mixer)) <= mixers
