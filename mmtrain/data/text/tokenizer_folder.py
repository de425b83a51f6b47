"""Read the tokenizer side of a Hugging Face model folder: vocabulary, special tokens, chat template, end tokens.

A vocabulary is treated as by the class of transformers that opens its folder.
Some classes of transformers 5 take only the vocabulary of `tokenizer.json`, and build anew how it cuts text. Which
class opens a folder depends on its model too: for a LLaVA whose tokenizer is said to be Llama's, the file counts.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from mmtrain.data.text.folder_templates import (
    NamedTemplate,
    find_templates,
    read_json,
    template_files,
    template_of_processor,
)
from mmtrain.errors import DataError
from mmtrain.families.folder_files import (
    ADDED_TOKENS_FILE,
    CONFIG_FILE,
    CONVERSATION_FILES,
    GENERATION_FILE,
    SLOW_TOKENIZER_FILES,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from mmtrain.recipe.settings.modalities import MediaKind

# What transformers 5 gives to templates. Other tokens that a folder names, such as that of images, are not defined.
_TEMPLATE_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_AS_FILED = "TokenizersBackend"  # the class that takes all of `tokenizer.json`
# The class that is registered for a type of model; of those that are not here, the one that the folder states.
_CLASS_OF_MODEL = {
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "internvl": "Qwen2Tokenizer",
    "llava": _AS_FILED,
    "llava_next": _AS_FILED,
    "mistral": _AS_FILED,
    "mistral3": _AS_FILED,
    **dict.fromkeys(
        ("qwen2", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3", "qwen3_omni_moe", "qwen3_vl"),
        "Qwen2Tokenizer",
    ),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
}
# Types of models whose folders are known to state a wrong class.
_STATED_WRONGLY = ("llava", "llava_next", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_5_PATTERN = (  # which keeps combining marks with the letters before them
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_MAX_IDS = 1 << 32  # of tokens, by the type of the library


@dataclass(frozen=True)
class TokenizerFolder:
    """What `read_tokenizer_folder` found."""

    path: Path
    tokenizer: Tokenizer
    template: NamedTemplate
    tool_template: NamedTemplate | None  # of conversations with tools, if that is another one
    special_tokens: dict[str, str]  # variables of the template, such as `bos_token`
    end_ids: frozenset[int]  # where generation ends
    media_tokens: dict[MediaKind, str]  # that `config.json` or the tokenizer's settings name for a kind of media


def read_tokenizer_folder(path: Path, model_folder: Path | None = None, has_processor: bool = False) -> TokenizerFolder:
    """Read a folder.

    model_folder: that of the model that the tokenizer serves, if another.
    has_processor: whether the model is served through a processor, as those with media are.

    Raises `DataError`.
    """
    tokenizer = _read_tokenizer(path)
    config = read_json(path / TOKENIZER_CONFIG_FILE)
    model_config = (model_folder or path) / CONFIG_FILE
    model = read_json(model_config)
    named_tokens = _named_tokens(config)
    more_tokens = _named_tokens(read_json(path / SPECIAL_TOKENS_FILE))
    # transformers reads the older file only where the newer one does not list the added tokens.
    named_tokens = more_tokens | named_tokens if "added_tokens_decoder" in config else named_tokens | more_tokens
    tokenizer_class = find_tokenizer_class(tokenizer, config, model)
    if tokenizer_class is not None:
        tokenizer_class.cut_text(tokenizer, config)
        stated = {name: token for name, token in tokenizer_class.default_tokens.items() if name not in config}
        named_tokens = stated | named_tokens
    _add_tokens(tokenizer, path, config, named_tokens)
    _require_usable(tokenizer, path)
    templates = find_templates(path, has_processor)
    return TokenizerFolder(
        path,
        tokenizer,
        templates.default,
        templates.tool_use,
        {name: token for name, token in named_tokens.items() if name in _TEMPLATE_TOKENS},
        _end_ids(path, tokenizer, named_tokens),
        _media_tokens(model_config, model, tokenizer, named_tokens),
    )


def _require_usable(tokenizer: Tokenizer, path: Path) -> None:
    """Raise `DataError` for a tokenizer whose parts do not fit together: the library says so only when it encodes."""
    try:
        tokenizer.encode("a \u4e00 \U0001f600 \u0378")  # a character that no vocabulary has is among them
    except Exception as error:  # the library has no type of its own
        raise DataError(f"data.tokenizer: {path / TOKENIZER_FILE}: cannot encode a text: {error}") from None


def tokenizer_sha256(path: Path, model_folder: Path | None = None) -> str:
    """Hash what decides the ids of a conversation: a `tokenizers` file, or the files of a folder. Raises `OSError`.

    model_folder: that of the model that the tokenizer serves, if another.
    """
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    content: dict[str, object] = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in CONVERSATION_FILES
        if (path / name).is_file()
    }
    content["templates"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in template_files(path)}
    content["template of processor"] = template_of_processor(path)
    model = read_json((model_folder or path) / CONFIG_FILE)
    content["model"] = [model.get(key) for key in ("architectures", "model_type", "tokenizer_class")]
    content["media tokens"] = {kind: _media_token_id(model, kind) for kind in get_args(MediaKind)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _read_tokenizer(path: Path) -> Tokenizer:
    file = path / TOKENIZER_FILE
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        slow = [name for name in SLOW_TOKENIZER_FILES if (path / name).exists()]
        if not slow:
            raise DataError(
                f"data.tokenizer: {path} has no {TOKENIZER_FILE}; expected the folder of a Hugging Face model, or the "
                "path of a `tokenizers` JSON file"
            ) from None
        raise DataError(
            f"data.tokenizer: {path} has {', '.join(slow)}, but no {TOKENIZER_FILE}; convert the tokenizer once, with "
            'the packages transformers and sentencepiece: python -c "from transformers import AutoTokenizer; '
            f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')\""
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise DataError(f"data.tokenizer: {file}: not a `tokenizers` JSON file: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a file gives names, such as `eos_token`: texts, or objects with the text as `content`."""
    extra = config.get("extra_special_tokens")
    entries = {**config, **(extra if isinstance(extra, dict) else {})}
    named = {name: _token_text(value) for name, value in entries.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text}


def _token_text(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _add_tokens(tokenizer: Tokenizer, path: Path, config: Mapping[str, Any], named_tokens: Mapping[str, str]) -> None:
    """Add the tokens that other files of the folder add to `tokenizer.json`, with the ids that they state."""
    declared: dict[int, AddedToken] = {}
    entries = config.get("added_tokens_decoder")
    if isinstance(entries, dict):
        for token_id, entry in entries.items():
            if not str(token_id).isdigit() or not _token_text(entry):
                raise DataError(
                    f"data.tokenizer: {path / TOKENIZER_CONFIG_FILE}: `added_tokens_decoder` has the entry "
                    f"{token_id!r}: {entry!r}; expected the id of a token, and an object with its `content`"
                )
            declared[int(token_id)] = _added_token(entry)
    else:
        for text, token_id in read_json(path / ADDED_TOKENS_FILE).items():
            if type(token_id) is not int:
                raise DataError(f"data.tokenizer: {path / ADDED_TOKENS_FILE}: {text!r} has the id {token_id!r}")
            special = text in named_tokens.values()
            declared[token_id] = AddedToken(text, normalized=not special, special=special)
    present = tokenizer.get_added_tokens_decoder()
    for token_id, token in sorted(declared.items(), key=lambda entry: entry[0]):
        if token_id in present and present[token_id].content == token.content:
            continue
        tokenizer.add_tokens([token])
        actual = tokenizer.token_to_id(token.content)
        if actual != token_id:
            raise DataError(
                f"data.tokenizer: {path}: the token {token.content!r} has the id {token_id} in "
                f"{TOKENIZER_CONFIG_FILE} or {ADDED_TOKENS_FILE}, but {actual} with {TOKENIZER_FILE}; save the "
                "tokenizer again with transformers"
            )


def _added_token(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: entry.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
    normalized = entry.get("normalized", not flags["special"]) is True
    return AddedToken(_token_text(entry), normalized=normalized, **flags)


def _end_ids(path: Path, tokenizer: Tokenizer, named_tokens: Mapping[str, str]) -> frozenset[int]:
    """Return the ids at which generation ends: those of `generation_config.json`, else the end of a sequence."""
    ids = read_json(path / GENERATION_FILE).get("eos_token_id")
    if ids is None:
        end_id = tokenizer.token_to_id(named_tokens.get("eos_token", ""))
        return frozenset() if end_id is None else frozenset({end_id})
    listed = ids if isinstance(ids, list) else [ids]
    bad = [token_id for token_id in listed if _token_of(tokenizer, token_id) is None]
    if bad:
        raise DataError(
            f"data.tokenizer: {path / GENERATION_FILE}: `eos_token_id` is {ids}, but {TOKENIZER_FILE} has no token "
            f"with the id {bad[0]}"
        )
    return frozenset(listed)


def _token_of(tokenizer: Tokenizer, token_id: object) -> str | None:
    """Return the token with an id that a file names; None for what is no id of the vocabulary."""
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < _MAX_IDS:
        return None
    return tokenizer.id_to_token(token_id)


def _media_tokens(
    model_config: Path, model: Mapping[str, Any], tokenizer: Tokenizer, named_tokens: Mapping[str, str]
) -> dict[MediaKind, str]:
    """Return for kinds of media the token that `config.json` or the tokenizer's settings name as their placeholder."""
    tokens: dict[MediaKind, str] = {}
    for kind in get_args(MediaKind):
        token_id = _media_token_id(model, kind)
        by_id = _token_of(tokenizer, token_id)
        token = by_id or named_tokens.get(f"{kind}_token")
        if token_id is not None and by_id is None:
            raise DataError(
                f"data.tokenizer: {model_config} names the token {token_id} for {kind} features, which "
                f"{TOKENIZER_FILE} lacks; take both files from the same model"
            )
        if token:
            tokens[kind] = token
    return tokens


def _media_token_id(model: Mapping[str, Any], kind: str) -> int | None:
    """Return the id that `config.json` names for the features of a kind of media; families name it differently."""
    thinker = model.get("thinker_config")  # the part of Qwen's omni models that reads media and writes text
    for section in (model, thinker if isinstance(thinker, dict) else {}):
        for key in (f"{kind}_token_id", f"{kind}_token_index"):
            if type(section.get(key)) is int:
                return int(section[key])
    return None


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


def _cut_as_qwen2(tokenizer: Tokenizer, config: Mapping[str, Any], pattern: str = _QWEN2_PATTERN) -> None:
    _set_model(tokenizer, byte_fallback=False, fuse_unk=False, unk_token=None)
    tokenizer.normalizer = normalizers.NFC()
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), by_bytes]
    )


def _cut_as_qwen3_5(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    _cut_as_qwen2(tokenizer, config, _QWEN3_5_PATTERN)


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
_TOKENS_OF_QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT)
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
    "Qwen2Tokenizer": TokenizerClass(_TOKENS_OF_QWEN, _cut_as_qwen2),
    "Qwen3_5Tokenizer": TokenizerClass(_TOKENS_OF_QWEN, _cut_as_qwen3_5),
    "GPT2Tokenizer": TokenizerClass(dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), _cut_as_gpt2),
}
