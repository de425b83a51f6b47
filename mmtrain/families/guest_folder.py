"""Read the folder of a guest: a model that no family covers, and whose modules `transformers` builds.

Its config is read for planning alone: a guest has no setting of ours that says what it computes, and all keys that
decide that are read by `transformers`. `mmtrain.guests` names its parameters.
"""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.family import Family, FolderSettings, Settings
from mmtrain.families.registry import FAMILIES
from mmtrain.families.stored_tensors import read_headers

# What config classes call the sizes of a decoder, the usual name first.
_SIZE_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "vocab": ("vocab_size",),
}
_CAUSAL = ("ForCausalLM", "LMHeadModel")  # what classes of `transformers` for causal language modeling end in
_WIDTH_KEYS = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_HEADS_KEYS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_USUAL_HEAD_DIM = 64  # of models whose config has no heads (Mamba)
_KV_HEADS_KEY, _HEAD_DIM_KEY, _TIED_KEY = "num_key_value_heads", "head_dim", "tie_word_embeddings"
_HIDDEN_PER_HEAD = 4  # width of an MLP over that of the residual stream, where a config states none (GPT-2)
_ENCODER_SECTIONS = ("vision_config", "audio_config", "text_config", "thinker_config", "encoder")
_GATES = ("gate_proj", "gate_up_proj", ".w1.")  # in names of tensors of gated MLPs
_HEADS = ("lm_head.", "embed_out.")  # in names of output matrices
_PLAIN_FAMILY = "llama"  # which families of text are variants of


def read_guest(config: Mapping[str, Any], folder: Path) -> tuple[Family, FolderSettings]:
    """Return the family of one that a guest is, and the sizes by which plans are made.

    The family names no weights: `mmtrain.guests` knows the parameters. Raises ModelFolderError for a folder that is
    none of a text model, and for one that states no sizes.
    """
    sections = [key for key in _ENCODER_SECTIONS if isinstance(config.get(key), Mapping)]
    if sections:
        raise ModelFolderError(
            f"{folder}: {sections[0]}: a guest, a model whose modules are those of transformers, is a text model so "
            "far, and this one has parts of its own for other media"
        )
    stated = config.get("architectures")
    architecture = stated[0] if isinstance(stated, list) and stated else None
    if not (isinstance(architecture, str) and architecture.endswith(_CAUSAL)):
        raise ModelFolderError(
            f"{folder}: architectures: found {architecture!r}; a guest has a language head, and its class ends in "
            f"{' or '.join(_CAUSAL)}"
        )
    if not isinstance(config.get("model_type"), str):
        raise ModelFolderError(f"{folder}: model_type is missing, by which transformers finds the classes of a guest")
    settings = FolderSettings({"llm": _decoder_sizes(config, folder)})
    return Family("guest", (), lambda _: settings, lambda _: iter(()), {}), settings


def _decoder_sizes(config: Mapping[str, Any], folder: Path) -> Settings:
    sizes: dict[str, Any] = {}
    for name, keys in _SIZE_KEYS.items():
        stated = [config[key] for key in keys if key in config]
        if not stated or type(stated[0]) is not int or stated[0] < 1:
            raise ModelFolderError(
                f"{folder}: {keys[0]}: found {stated[0] if stated else 'nothing'}; allowed: a whole number of at least "
                f"1, as plans for a guest need it (also read: {', '.join(keys[1:]) or 'no other key'})"
            )
        sizes[name] = stated[0]
    tensors = _tensor_names(folder)
    width = next((config[key] for key in _WIDTH_KEYS if isinstance(config.get(key), int)), None)
    heads = next((config[key] for key in _HEADS_KEYS if isinstance(config.get(key), int)), None)
    heads = heads or max(sizes["hidden"] // _USUAL_HEAD_DIM, 1)
    kv_heads = config.get(_KV_HEADS_KEY)
    head_dim = config.get(_HEAD_DIM_KEY)
    return {
        **sizes,
        "heads": heads,
        "kv_heads": kv_heads if isinstance(kv_heads, int) else heads,
        "head_dim": head_dim if isinstance(head_dim, int) else max(sizes["hidden"] // heads, 1),
        "ffn": width or _HIDDEN_PER_HEAD * sizes["hidden"],
        "mlp": "swiglu" if not tensors or _any_has(tensors, _GATES) else "gelu",
        "tie_embeddings": not _any_has(tensors, _HEADS) if tensors else config.get(_TIED_KEY) is True,
    }


def _tensor_names(folder: Path) -> Collection[str]:
    """Return the names of the tensors of a folder; none where its weights are not here yet."""
    try:
        return read_headers(folder).keys()
    except (ModelFolderError, OSError):
        return ()


def _any_has(names: Collection[str], parts: tuple[str, ...]) -> bool:
    return any(part in name for name in names for part in parts)


def nearest_family(config: Mapping[str, Any]) -> str:
    """Return the family whose plans a guest of this config could have if it were one: that of the nearest name."""
    found = str(config.get("model_type"))
    if found in FAMILIES:
        return found
    return next(iter(get_close_matches(found, FAMILIES, n=1)), _PLAIN_FAMILY)
