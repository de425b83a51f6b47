"""Whisper's audio encoder (arXiv 2212.04356), as `WhisperEncoder` of `transformers` computes it, and Qwen2-Audio's."""

from collections.abc import Iterator, Mapping

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings
from mmtrain.families.weight_layouts import ParameterSource, as_is, flattened, query_key_value

_KERNEL = 3  # of both convolutions
_WITHOUT_DROPOUT = ("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop")
# What the config classes of Qwen's audio encoders assume for keys that are missing.
QWEN_ENCODER_DEFAULTS = {
    "encoder_layers": 32,
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}


def whisper_settings(config: ConfigSection, defaults: Mapping[str, int]) -> Settings:
    """Return the settings of an encoder without its projector.

    defaults: what the config class in `transformers` assumes for the keys that are missing.
    """
    for key in _WITHOUT_DROPOUT:
        config.require(key, 0, 0.0, default=0)
    config.pass_over("init_std", "scale_embedding")  # what `scale_embedding` scales is used by the decoder only
    return {
        "layers": config.integer("encoder_layers", defaults["encoder_layers"]),
        "hidden": config.integer("d_model", defaults["d_model"]),
        "heads": config.integer("encoder_attention_heads", defaults["encoder_attention_heads"]),
        "ffn": config.integer("encoder_ffn_dim", defaults["encoder_ffn_dim"]),
        "mel_bins": config.integer("num_mel_bins", defaults["num_mel_bins"]),
        "activation": config.choice("activation_function", {"gelu": "gelu"}, "gelu"),
        "norm_eps": 1e-5,
        "key_bias": False,
        "positions": "fixed",
        "chunk": None,
        "conv_channels": None,
        "window_chunks": 1,
        "max_frames": 2 * config.integer("max_source_positions", 1500),
    }


def whisper_weights(audio: Settings, model: str, last_norm: str = "layer_norm") -> Iterator[ParameterSource]:
    """Yield the weights of the encoder, without its projector; `model` is the prefix of its tensors."""
    hidden, layers = audio["hidden"], audio["layers"]
    ours = "audio.layers.0."
    for conv, channels in (("conv1", audio["mel_bins"]), ("conv2", hidden)):
        yield flattened(f"{ours}{conv}.weight", f"{model}{conv}.weight", (hidden, channels, _KERNEL))
        yield as_is(f"{ours}{conv}.bias", f"{model}{conv}.bias", (hidden,))
    if audio["positions"] == "fixed":
        num_positions = audio["max_frames"] // 2
        yield as_is(f"{ours}positions", f"{model}embed_positions.weight", (num_positions, hidden))
    yield from whisper_block_weights(audio, model)
    for kind in ("weight", "bias"):
        yield as_is(f"audio.layers.{layers + 1}.post_norm.{kind}", f"{model}{last_norm}.{kind}", (hidden,))


def whisper_block_weights(audio: Settings, model: str) -> Iterator[ParameterSource]:
    """Yield the weights of all blocks; `model` is the prefix of the encoder's tensors."""
    for block in range(audio["layers"]):
        yield from _block_weights(audio, f"audio.layers.{block + 1}.", f"{model}layers.{block}.")


def _block_weights(audio: Settings, ours: str, theirs: str) -> Iterator[ParameterSource]:
    """Yield the weights of one block, whose keys may have no bias."""
    hidden, heads, ffn = audio["hidden"], audio["heads"], audio["ffn"]
    attention = f"{theirs}self_attn."
    for kind, inputs, inner_inputs in (("weight", (hidden,), (ffn,)), ("bias", (), ())):
        yield as_is(f"{ours}input_layernorm.{kind}", f"{theirs}self_attn_layer_norm.{kind}", (hidden,))
        key = f"{attention}k_proj.{kind}" if kind == "weight" or audio["key_bias"] else None
        projections = (f"{attention}q_proj.{kind}", key, f"{attention}v_proj.{kind}")
        joint = f"{ours}self_attention.linear_qkv.{kind}"
        yield query_key_value(joint, projections, heads, heads, hidden // heads, inputs)
        output = f"{ours}self_attention.linear_proj.{kind}"
        yield as_is(output, f"{attention}out_proj.{kind}", (hidden, *inputs))
        yield as_is(f"{ours}pre_mlp_layernorm.{kind}", f"{theirs}final_layer_norm.{kind}", (hidden,))
        yield as_is(f"{ours}mlp.linear_fc1.{kind}", f"{theirs}fc1.{kind}", (ffn, *inputs))
        yield as_is(f"{ours}mlp.linear_fc2.{kind}", f"{theirs}fc2.{kind}", (hidden, *inner_inputs))
