"""The audio encoder equals Whisper's, and packed clips equal separate ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmtrain.errors import DataError
from mmtrain.models.stage.audio_layers import AudioEmbed, sinusoids
from mmtrain.models.stage.projector import Projector
from mmtrain.models.stage.stage_module import StageModule
from tests.models.factory import CPU, clips, clips_of, randomize, settings, stage
from tests.models.huggingface import whisper_unit


def _copy(module: StageModule, weights: dict[str, Tensor]) -> None:
    params = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in weights.items():
            params[name].copy_(value)


def test_hidden_states_equal_whispers() -> None:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        num_mel_bins=20, d_model=32, encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=48,
        max_source_positions=24, dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = WhisperEncoder(config).eval()
    positions = theirs.embed_positions.weight.detach().clone()
    randomize(theirs)  # biases and norms away from 0 and 1; the positions are no weights
    with torch.no_grad():
        theirs.embed_positions.weight.copy_(positions)
    model = settings(audio={"mel_bins": 20, "max_frames": 48, "downsample": 1})
    ours = stage(model, "audio")
    _copy(ours, whisper_unit(theirs.state_dict(), num_blocks=2, heads=4))
    generator = torch.Generator().manual_seed(5)
    mels = torch.randn(2, 48, 20, generator=generator)  # Whisper itself takes clips of full length only
    with torch.no_grad():
        expected = theirs(mels.transpose(1, 2)).last_hidden_state.flatten(0, 1)
        context = ours.context(clips_of((48, 48), mels.flatten(0, 1)), {})
        hidden, _ = ours._run_layers(range(3), None, context)
        last = ours.layers["3"]
        assert isinstance(last, Projector)
        assert last.post_norm is not None
        normalized = last.post_norm(hidden)
    assert normalized.shape == (48, 32)
    difference = (normalized - expected).abs().max()
    assert difference < 1e-4, f"hidden states differ by {difference:.2e}"
    assert expected.std() > 0.1  # else the comparison would prove nothing


def test_packed_clips_equal_separate_clips() -> None:
    unit = stage(settings(audio={"positions": "learned"}), "audio")
    randomize(unit)
    together = clips(8, 4, 0, 20)
    assert together.cells is not None
    parts = zip((8, 4, 20), together.cells.split((8, 4, 20)), strict=True)
    expected = torch.cat([unit(None, clips_of((n,), mels)) for n, mels in parts])
    assert expected.shape == (32 // 4, 48)
    torch.testing.assert_close(unit(None, together), expected, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_clip_are_computed_like_clips_of_their_own() -> None:
    """Features join tokens of two chunks; the last token stands for one frame."""
    unit = stage(settings(audio={"chunk": 6, "clip_end": "unpadded", "downsample": 1}), "audio")
    joined = stage(settings(audio={"chunk": 6, "clip_end": "unpadded", "downsample": 2, "pooling": "mean"}), "audio")
    randomize(unit)
    randomize(joined)
    clip = clips(15)
    assert clip.cells is not None
    expected = torch.cat([unit(None, clips_of((len(mels),), mels)) for mels in clip.cells.split(6)])
    assert expected.shape == (3 + 3 + 2, 48)
    torch.testing.assert_close(unit(None, clip), expected, rtol=1e-4, atol=1e-5)
    assert joined(None, clip).shape == (4, 48)


def test_convolutions_are_torchs_own_with_zeros_around_each_clip() -> None:
    unit = stage(settings(audio={}), "audio", (0, 1))
    randomize(unit)
    embed = unit.layers["0"]
    assert isinstance(embed, AudioEmbed)
    inputs = clips(6, 10)
    assert inputs.cells is not None
    expected = []
    for mels in inputs.cells.split((6, 10)):
        x = mels.T[None]
        for conv, stride in ((embed.conv1, 1), (embed.conv2, 2)):
            weight = conv.weight.view(32, -1, 3)
            x = nn.functional.gelu(nn.functional.conv1d(x, weight, conv.bias, stride=stride, padding=1))
        expected.append(x[0].T + sinusoids(x.shape[2], 32, CPU))
    torch.testing.assert_close(unit(None, inputs), torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "audio", [{}, {"pooling": "mean", "projector": {"kind": "linear"}}, {"chunk": 4, "clip_end": "unpadded"}]
)
def test_a_microbatch_without_clips_gives_every_weight_a_zero_gradient(audio: dict[str, Any]) -> None:
    unit = stage(settings(audio=audio), "audio")
    features = unit(None, clips_of((), torch.zeros(0, 10)))
    assert features.shape == (0, 48)
    features.sum().backward()
    for name, param in unit.named_parameters():
        assert param.grad is not None, name
        assert not param.grad.any(), name


def test_a_frozen_encoder_can_still_train_its_projector() -> None:
    unit = stage(settings(audio={"freeze": True}), "audio")
    trained = {name for name, param in unit.named_parameters() if param.requires_grad}
    assert trained == {f"layers.3.linear_{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}


def test_a_clip_beyond_the_positions_is_rejected() -> None:
    with pytest.raises(DataError, match=r"84 log-mel frames long, but the encoder's `max_frames` is 80"):
        stage(settings(audio={}), "audio", (0, 1))(None, clips(84))


@pytest.mark.parametrize("pooling", ["join", "mean"])
def test_tokens_that_fill_no_feature_are_seen_and_left_out(pooling: str) -> None:
    unit = stage(settings(audio={"pooling": pooling}), "audio")
    inputs = clips(6, 9, 8)  # the ninth frame is looked at, and becomes no token
    assert inputs.cells is not None
    features = unit(None, inputs)
    assert features.shape == (1 + 2 + 2, 48)
    for column in (5, 14):  # in the last token of a clip, and the frame behind the last token
        other = inputs.cells.clone()
        other[column] += 1
        changed = (unit(None, clips_of((6, 9, 8), other)) - features).abs().amax(dim=1) > 1e-6
        assert changed.tolist() == ([True] + [False] * 4 if column == 5 else [False, True, True, False, False])


def test_keys_have_no_bias_and_tensor_parallel_shards_neither() -> None:
    unit = stage(settings(audio={"key_bias": False}), "audio")
    randomize(unit)
    before = unit(None, clips(8, 12))
    linear = unit.layers["1"].self_attention.linear_qkv  # type: ignore[union-attr]
    with torch.no_grad():
        linear.bias.view(4, 3, 8)[:, 1] += 5  # type: ignore[operator, union-attr]
    after = unit(None, clips(8, 12))
    assert torch.equal(before, after)
    after.sum().backward()
    gradient = linear.bias.grad.view(4, 3, 8)  # type: ignore[operator, union-attr]
    assert not gradient[:, 1].any()
    assert gradient[:, 2].any()
