"""Keys that a config states in two places: what holds is what the config class of `transformers` makes of them."""

import json
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.errors import ModelFolderError
from mmtrain.families import FAMILIES, read_model_folder

ABSENT = object()
KEY = "tie_word_embeddings"
NESTED = [name for name, family in FAMILIES.items() if "text_config" in family.tiny["config.json"]]
QUICK = ("llava_onevision", "qwen2_audio", "qwen2_vl")  # each another rule; building the models takes time
FLAT_LAYOUTS = ["qwen2_vl", "qwen2_5_vl"]  # whose older folders state the keys of the LLM beside others


def _config(family: str, outer: Mapping[str, Any], inner: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the config of the tiny model with these keys in both places, and `KEY` in no other."""
    config = {key: value for key, value in FAMILIES[family].tiny["config.json"].items() if key != KEY}
    if inner is not None:
        text = {key: value for key, value in config["text_config"].items() if key != KEY}
        config["text_config"] = _stated({**text, **inner})
    return _stated({**config, **outer})


def _stated(section: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value is not ABSENT}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _their_config(folder: Path, config: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, config["architectures"][0]).config_class.from_pretrained(folder)


def _ties(folder: Path, config: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether ours and theirs tie the embeddings."""
    import transformers

    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])._from_config(_their_config(folder, config))
    theirs = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return read_model_folder(folder).settings.model["llm"]["tie_embeddings"], theirs


def _tie_values() -> Iterator[tuple[object, object]]:
    yield from product((ABSENT, True, False), repeat=2)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NESTED]
)
def test_embeddings_are_tied_as_the_class_of_the_family_ties_them(tmp_path: Path, family: str) -> None:
    for outer, inner in _tie_values():
        config = _config(family, {KEY: outer}, {KEY: inner})
        ours, theirs = _ties(_write(tmp_path, config), config)
        assert ours == theirs, (outer is ABSENT, outer, inner is ABSENT, inner)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NESTED)))
def test_embeddings_of_a_bare_decoder_are_tied_as_it_says(tmp_path: Path, family: str) -> None:
    for value in (ABSENT, True, False):
        config = _config(family, {KEY: value})
        ours, theirs = _ties(_write(tmp_path, config), config)
        assert ours == theirs, value


@pytest.mark.slow
def test_the_head_of_a_whole_omni_belongs_to_its_thinker(tmp_path: Path) -> None:
    import transformers

    for outer, (middle, inner) in product((ABSENT, True, False), _tie_values()):
        thinker = _config("qwen2_5_omni", {KEY: middle}, {KEY: inner})
        whole = {"architectures": ["Qwen2_5OmniForConditionalGeneration"], "model_type": "qwen2_5_omni"}
        config = _stated({**whole, "thinker_config": thinker, KEY: outer})
        folder = _write(tmp_path, config)
        their_thinker = transformers.Qwen2_5OmniConfig.from_pretrained(folder).thinker_config
        with torch.device("meta"):
            model = transformers.Qwen2_5OmniThinkerForConditionalGeneration._from_config(their_thinker)
        theirs = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert read_model_folder(folder).settings.model["llm"]["tie_embeddings"] == theirs


@pytest.mark.parametrize("family", FLAT_LAYOUTS)
def test_keys_of_the_llm_beside_its_section_are_copies_without_effect(tmp_path: Path, family: str) -> None:
    """`transformers` 4.52 to 4.56 wrote the keys of older folders again beside the section that they had become."""
    text = dict(FAMILIES[family].tiny["config.json"]["text_config"])
    plain = read_model_folder(_write(tmp_path, _config(family, {}, {}))).settings
    flat = {key: value for key, value in text.items() if key not in ("model_type", KEY)}
    assert read_model_folder(_write(tmp_path, _config(family, flat, {}))).settings == plain
    other = {**flat, "num_hidden_layers": 7, "rms_norm_eps": 0.5, "rope_theta": 3.0}
    config = _config(family, other, {})
    assert read_model_folder(_write(tmp_path, config)).settings == plain
    their_text = _their_config(tmp_path, config).text_config
    assert (their_text.num_hidden_layers, their_text.rms_norm_eps) == (plain.model["llm"]["layers"], 1e-6)


ROTARY = {
    "rope_theta": (ABSENT, 7e4),
    "rope_parameters": (
        ABSENT,
        None,
        {"rope_type": "default", "rope_theta": 2e4},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4},
    ),
    "rope_scaling": (
        ABSENT,
        None,
        {},
        {"type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4},
        {"rope_type": "default", "rope_theta": 6e4},
        {"factor": 4.0},
    ),
}


def _rotary_section(family: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return what replaces the rotary keys of a tiny model, in the form of the family."""
    sections = FAMILIES[family].tiny["config.json"].get("text_config", {}).get("rope_parameters", {})
    kept = {key: value for key, value in sections.items() if key.startswith("mrope")}
    changed = dict(stated)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(changed[key], dict) and changed[key]:
            changed[key] = {**changed[key], **kept}
    if family.startswith("gemma3") and isinstance(changed["rope_parameters"], dict):
        changed["rope_parameters"] = {"full_attention": changed["rope_parameters"]}
    if family == "mistral3":  # of whose two decoders one has few kinds of positions
        changed["model_type"] = "mistral"
    return changed


# Of these no version wrote flat keys: `transformers` leaves them without positions. `tests/weights/test_gemma4.py` has
# what their folders state.
_OF_ONE_SPELLING = {"gemma4", "gemma4_text"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in _OF_ONE_SPELLING])
def test_rotary_positions_stated_twice_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    num_compared = 0
    for values in product(*ROTARY.values()):
        stated = _rotary_section(family, dict(zip(ROTARY, values, strict=True)))
        config = _config(family, {}, stated) if family in NESTED else _config(family, stated)
        _write(tmp_path, config)
        try:
            ours = read_model_folder(tmp_path).settings.model["llm"]
        except ModelFolderError:  # a clear refusal; how many there may be is limited below
            continue
        their_config = _their_config(tmp_path, config)
        theirs = getattr(their_config, "text_config", their_config).rope_parameters
        theirs = theirs.get("full_attention", theirs)
        scaling = ours["rope_scaling"]
        assert ours["rope_base"] == theirs["rope_theta"], stated
        assert ("default" if scaling is None else scaling["kind"]) == theirs["rope_type"], stated
        assert scaling is None or scaling["factor"] == theirs["factor"], stated
        num_compared += 1
    assert num_compared >= 50
