"""Treat a vocabulary as the tokenizer class of transformers does that opens its folder.

Some classes of transformers 5 take only the vocabulary of `tokenizer.json`, and build anew how it cuts text. Which
class opens a folder depends on its model too: for a LLaVA whose tokenizer is said to be Llama's, the file counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

_AS_FILED = "TokenizersBackend"  # the class that takes all of `tokenizer.json`
# The class that is registered for a type of model; of those that are not here, the one that the folder states.
_CLASS_OF_MODEL = {
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "internvl": "Qwen2Tokenizer",
    "llava": _AS_FILED,
    "llava_next": _AS_FILED,
    "mistral": _AS_FILED,
    **dict.fromkeys(
        ("qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3", "qwen3_vl"), "Qwen2Tokenizer"
    ),
}
_STATED_WRONGLY = ("llava", "llava_next", "qwen2")  # types of models whose folders are known to state a wrong class
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TokenizerClass:
    """A class of transformers that builds anew how text is cut.

    default_tokens: its special tokens where the folder does not name them.
    cut_text: changes a tokenizer with its vocabulary, by the settings of `tokenizer_config.json`.
    """

    default_tokens: Mapping[str, str]
    cut_text: Callable[[Tokenizer, Mapping[str, Any]], None]


def find_tokenizer_class(
    tokenizer: Tokenizer, config: Mapping[str, Any], model: Mapping[str, Any]
) -> TokenizerClass | None:
    """Return the class that opens a folder; None if that takes all of `tokenizer.json`.

    config, model: the content of `tokenizer_config.json` and `config.json`.
    """
    model_type = model.get("model_type")
    stated = str(config.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    registered = _CLASS_OF_MODEL.get(model_type, "") if isinstance(model_type, str) else ""
    name = stated or registered
    if registered and stated != registered and (registered == _AS_FILED or model_type in _STATED_WRONGLY):
        name = registered
    if name == "LlamaTokenizer" and _is_byte_level(tokenizer):  # Llama 3's, in a folder that states Llama 2's class
        return None
    return _CLASSES.get(name) if isinstance(tokenizer.model, models.BPE) else None


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    parts = (tokenizer.pre_tokenizer, tokenizer.decoder, tokenizer.post_processor)
    return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)


def _cut_as_llama(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Mark the start of words: by default that of the whole text only, and not those after special tokens."""
    scheme = "always" if config.get("legacy") else "first"
    if config.get("add_prefix_space") not in (None, True):
        scheme = "never"
    _set_model(tokenizer, byte_fallback=True, fuse_unk=True, unk_token=None)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def _cut_as_qwen2(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, byte_fallback=False, fuse_unk=False, unk_token=None)
    tokenizer.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated"), by_bytes]
    )


def _cut_as_gemma(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    unknown = config.get("unk_token", "<unk>")
    unknown = unknown.get("content") if isinstance(unknown, Mapping) else unknown
    _set_model(tokenizer, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")


def _cut_as_gpt2(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(tokenizer, byte_fallback=False, fuse_unk=False, unk_token=None)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))


def _set_model(tokenizer: Tokenizer, **settings: Any) -> None:
    """Change settings of a BPE model in place, which takes no time, unlike making one of its vocabulary."""
    tokenizer.model.ignore_merges = False
    for name, value in settings.items():
        setattr(tokenizer.model, name, value)


_END_OF_TEXT = "<|endoftext|>"
_CLASSES = {
    "LlamaTokenizer": TokenizerClass({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _cut_as_llama),
    "GemmaTokenizer": TokenizerClass(
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _cut_as_gemma,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT), _cut_as_qwen2
    ),
    "GPT2Tokenizer": TokenizerClass(dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), _cut_as_gpt2),
}
