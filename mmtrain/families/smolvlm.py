"""The LLM of a SmolVLM or SmolVLM2 (arXiv 2504.05299), as `SmolVLMForConditionalGeneration` of `transformers` has it.

It is trained on texts. Pictures are not built yet: their processor cuts them into rows of tiles and writes the row and
the column of each into the text. Training leaves the tensors of the tower alone, and export copies them.
"""

from collections.abc import Iterator

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.decoders import decoder_buffers, decoder_weights, tied_by_outer
from mmtrain.families.family import MEDIA_TOKENS, Family, FolderSettings, Settings, tiny_decoder, tiny_token_id
from mmtrain.families.siglip import siglip_weights
from mmtrain.families.text_decoders import text_settings
from mmtrain.families.weight_layouts import ParameterSource, as_is

_ARCHITECTURE = "SmolVLMForConditionalGeneration"
_TOWER, _CONNECTOR = "model.vision_model.", "model.connector.modality_projection.proj.weight"
_OF_TOKENIZER = ("image_token_id", "vocab_size")
# Keys of its own trainer that folders of the hub state and a Llama of `transformers` does not read.
_UNREAD_BY_LLAMA = ("is_llama_config", "perceiver_config", "pixel_shuffle_factor", "transformers.js_config")
_TINY = {
    "architectures": [_ARCHITECTURE],
    "model_type": "smolvlm",
    "image_token_id": tiny_token_id(MEDIA_TOKENS["image"]),
    "text_config": tiny_decoder(model_type="llama", rms_norm_eps=1e-5, rope_theta=130000.0),
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "scale_factor": 2,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _settings(config: ConfigSection) -> FolderSettings:
    config.pass_over(*_OF_TOKENIZER)
    text = config.section("text_config")
    if not text:
        config.reject("text_config", "missing; allowed: the section of a Llama")
    text.pass_over(*_UNREAD_BY_LLAMA)
    llm = tied_by_outer(config, text_settings(text, "llama"))
    text.finish()
    unbuilt = tuple(_tower_weights(config, llm["hidden"]))
    return FolderSettings({"llm": llm}, carried=unbuilt)


def _tower_weights(config: ConfigSection, llm_hidden: int) -> Iterator[ParameterSource]:
    """Yield the weights of the tower, a SigLIP without a head, and of what joins squares of its features."""
    tower = config.section("vision_config")
    hidden, patch = tower.integer("hidden_size", 1152), tower.integer("patch_size", 32)
    vision: Settings = {
        "layers": tower.integer("num_hidden_layers", 12),
        "hidden": hidden,
        "heads": tower.integer("num_attention_heads", 16),
        "ffn": tower.integer("intermediate_size", 3072),
        "patch": patch,
        "max_side": tower.integer("image_size", 224) // patch,
        "post_norm": True,
    }
    yield from siglip_weights(vision, _TOWER)
    joined = hidden * config.integer("scale_factor", 2) ** 2
    yield as_is("vision.connector.weight", _CONNECTOR, (llm_hidden, joined))


def _weights(settings: FolderSettings) -> Iterator[ParameterSource]:
    return decoder_weights(settings, "model.text_model.")


SMOLVLM = Family(
    "smolvlm",
    (_ARCHITECTURE,),
    _settings,
    _weights,
    {"config.json": _TINY},
    markups={"image": None, "video": None},
    ignored=decoder_buffers,
)
