"""The audio encoder with convolutions over time and mel bands equals Qwen3-Omni's, whatever else is in a microbatch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.stage.stage_module import StageModule
from mmtrain.recipe.settings.audio_settings import AudioSettings
from tests.distributed import run_ranks
from tests.models.factory import CONVOLVED, clips_of, randomize, settings, stage

MEL_BINS, HIDDEN, OUT, HEADS, BLOCKS, CHANNELS = 10, 32, 48, 4, 2, 6
# Of whole chunks of 100 frames and windows of 400, one frame more or less, and shorter than a chunk.
LENGTHS = (1, 7, 8, 30, 97, 99, 100, 101, 104, 130, 200, 399, 400, 401, 850, 1234)
HUB = settings(
    audio={
        **CONVOLVED, "mel_bins": MEL_BINS, "chunk": 100, "max_frames": 3000, "window_chunks": 4,
        "activation": "gelu",
    }
)  # fmt: skip


def _theirs() -> nn.Module:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    config = Qwen3OmniMoeAudioEncoderConfig(
        num_mel_bins=MEL_BINS, d_model=HIDDEN, encoder_layers=BLOCKS, encoder_attention_heads=HEADS,
        encoder_ffn_dim=48, output_dim=OUT, n_window=50, n_window_infer=400, downsample_hidden_size=CHANNELS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3OmniMoeAudioEncoder(config).eval()
    positions = model.positional_embedding.positional_embedding.clone()
    randomize(model)
    torch.testing.assert_close(model.positional_embedding.positional_embedding, positions)
    return model


def _joint(of_qkv: Sequence[Tensor]) -> Tensor:
    """Put rows of queries, keys and values of one head after another."""
    return torch.stack([part.view(HEADS, HIDDEN // HEADS, *part.shape[1:]) for part in of_qkv], dim=1).flatten(0, 2)


def _ours_of(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, or gradients, of Qwen3-Omni's encoder by the names of our parameters."""
    ours = {"layers.0.conv_out.weight": theirs["conv_out.weight"]}
    last = f"layers.{BLOCKS + 1}."
    for kind in ("weight", "bias"):
        for number in (1, 2, 3):
            ours[f"layers.0.conv{number}.{kind}"] = theirs[f"conv2d{number}.{kind}"].reshape(CHANNELS, -1).squeeze()
        for block in range(BLOCKS):
            mine, of_block = f"layers.{block + 1}.", f"layers.{block}."
            projections = [theirs[f"{of_block}self_attn.{part}_proj.{kind}"] for part in "qkv"]
            ours |= {
                f"{mine}input_layernorm.{kind}": theirs[f"{of_block}self_attn_layer_norm.{kind}"],
                f"{mine}self_attention.linear_qkv.{kind}": _joint(projections),
                f"{mine}self_attention.linear_proj.{kind}": theirs[f"{of_block}self_attn.out_proj.{kind}"],
                f"{mine}pre_mlp_layernorm.{kind}": theirs[f"{of_block}final_layer_norm.{kind}"],
                f"{mine}mlp.linear_fc1.{kind}": theirs[f"{of_block}fc1.{kind}"],
                f"{mine}mlp.linear_fc2.{kind}": theirs[f"{of_block}fc2.{kind}"],
            }
        for name, of_projector in (("post_norm", "ln_post"), ("linear_1", "proj1"), ("linear_2", "proj2")):
            ours[f"{last}{name}.{kind}"] = theirs[f"{of_projector}.{kind}"]
    return ours


def _fill(ours: StageModule, whole: dict[str, Tensor], groups: ParallelGroups) -> StageModule:
    specs = stage_param_specs(ours, "audio", groups.tp_size)
    with torch.no_grad():
        for name, param in ours.named_parameters():
            value, dim = whole[name], specs[name].dim
            param.copy_(value if dim is None else value.chunk(groups.tp_size, dim)[groups.tp_rank])
    return ours


def _audio() -> AudioSettings:
    assert HUB.audio is not None
    return HUB.audio


def _mels(frames: int) -> Tensor:
    return torch.randn(frames, MEL_BINS, generator=torch.Generator().manual_seed(frames))


def _rows(frames: int) -> Tensor:
    """Lay frames into rows as the reader of clips does, written out chunk by chunk."""
    mels, rows = _mels(frames), []
    for chunk in mels.split(100):
        rows.append(chunk)
        missing = -len(chunk) % 8 if frames >= 100 else 0
        rows.append(torch.zeros(missing, MEL_BINS))
    return torch.cat(rows)


def _inputs(lengths: Sequence[int]) -> Any:
    rows = [_rows(frames) for frames in lengths]
    assert [len(of_clip) for of_clip in rows] == [_audio().count_cells(frames) for frames in lengths]
    return clips_of([len(of_clip) for of_clip in rows], torch.cat(rows) if rows else torch.zeros(0, MEL_BINS))


def _features_of(theirs: nn.Module, lengths: Sequence[int]) -> Tensor:
    """Return what `transformers` computes with clips one after another."""
    outputs = [theirs(_mels(frames).T, feature_lens=torch.tensor([frames])).last_hidden_state for frames in lengths]
    return torch.cat(outputs)


def _of_ranks(weights: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    groups = ParallelGroups.single()
    if dist.is_initialized():
        groups = replace(groups, tp=dist.group.WORLD)
    ours = _fill(stage(HUB, "audio", groups=groups), weights, groups)
    features = ours(None, _inputs(LENGTHS))
    features.square().sum().backward()
    return features.detach(), {name: param.grad for name, param in ours.named_parameters() if param.grad is not None}


@cache
def _expected() -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    theirs = _theirs()
    features = _features_of(theirs, LENGTHS)
    features.square().sum().backward()
    gradients = {name: param.grad for name, param in theirs.named_parameters() if param.grad is not None}
    weights = {name: value.detach() for name, value in theirs.named_parameters()}
    return _ours_of(weights), features.detach(), _ours_of(gradients)


def _assert_close(ours: Tensor, expected: Tensor, name: str) -> None:
    assert (ours - expected).abs().max() <= 1e-3 * expected.abs().max(), name


def test_features_and_gradients_equal_those_of_transformers() -> None:
    weights, expected, gradients = _expected()
    features, ours = _of_ranks(weights)
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
    assert ours.keys() == gradients.keys()
    for name, gradient in ours.items():
        if name.endswith("linear_qkv.bias"):  # of keys it is zero but for rounding
            gradient, gradients[name] = (
                of_heads.view(HEADS, 3, -1)[:, ::2] for of_heads in (gradient, gradients[name])
            )
        _assert_close(gradient, gradients[name], name)


def test_two_tensor_parallel_ranks_compute_the_same() -> None:
    weights, expected, gradients = _expected()
    for rank, (features, ours) in enumerate(run_ranks(2, _of_ranks, weights)):
        torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-4)
        for name, gradient in ours.items():
            whole = gradients[name]
            dim = next((d for d, size in enumerate(whole.shape) if size != gradient.shape[d]), None)
            if not name.endswith("linear_qkv.bias"):
                _assert_close(gradient, whole if dim is None else whole.chunk(2, dim)[rank], name)


def test_the_order_of_clips_and_their_neighbors_change_nothing() -> None:
    weights, *_ = _expected()
    ours = _fill(stage(HUB, "audio"), weights, ParallelGroups.single())
    apart = {frames: ours(None, _inputs([frames])) for frames in LENGTHS}
    order = np.random.default_rng(0).permutation(LENGTHS).tolist()
    torch.testing.assert_close(
        ours(None, _inputs(order)), torch.cat([apart[frames] for frames in order]), rtol=1e-4, atol=1e-5
    )


def test_a_microbatch_without_clips_gives_every_weight_a_zero_gradient() -> None:
    ours = stage(HUB, "audio")
    features = ours(None, _inputs(()))
    assert features.shape == (0, OUT)
    features.sum().backward()
    for name, param in ours.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


def test_a_chunk_sees_nothing_of_its_neighbors_in_the_convolutions() -> None:
    first = stage(HUB, "audio", (0, 1))
    randomize(first)
    inputs = _inputs([250])
    tokens = first(None, inputs)
    changed = inputs.cells.clone()
    changed[104:208] += 1  # the second chunk
    others = (first(None, clips_of(inputs.rows, changed)) - tokens).abs().amax(dim=1) > 0
    assert others.tolist() == [False] * 13 + [True] * 13 + [False] * 7


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"chunk": None}, "conv_channels needs chunk"),
        ({"clip_end": "zeros"}, "clip_end is zeros, with conv_channels allowed: unpadded or mirrored"),
        ({"positions": "learned"}, "positions is learned, with conv_channels allowed: sinusoidal"),
        ({"downsample": 2}, "downsample is 2, with conv_channels allowed: 1"),
        ({"conv_channels": None}, "window_chunks needs conv_channels"),
    ],
)
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        settings(audio={**CONVOLVED, **changes})


def test_items_of_a_clip_end_with_a_window() -> None:
    audio = _audio()
    assert [audio.cells_per_item(seconds) for seconds in (0.1, 4, 30)] == [416, 416, 8 * 416]
    assert audio.count_cells(8 * 400) == 8 * 416
