"""Read the rotary positions of a decoder from its config, as `transformers` computes them."""

from collections.abc import Callable, Mapping
from math import log
from typing import Any

from mmtrain.families.config_section import ConfigSection
from mmtrain.families.family import Settings

_YARN_FAST_TURNS, _YARN_SLOW_TURNS = 32.0, 1.0  # `beta_fast` and `beta_slow` of the paper (arXiv 2309.00071)
_UNSCALED_KINDS = ("default", "mrope")  # the second is how transformers 4 wrote positions in time, row and column


def rotary_settings(
    config: ConfigSection,
    default_theta: float,
    interleaved: bool = False,
    turns_all: bool = True,
    stated: ConfigSection | None = None,
) -> Settings:
    """Read the rotary positions as `transformers` 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`) wrote.

    interleaved: whether the family's pairs that time, row and column rotate take turns.
    turns_all: whether all features of a head turn; the caller reads which part of them does otherwise.
    stated: the section that holds, of a caller that has read more of it.
    """
    theta = config.number("rope_theta", default_theta)
    rotary = stated_rotary(config) if stated is None else stated
    if turns_all:
        rotary.require("partial_rotary_factor", 1.0, 1, None, default=None)
    else:
        rotary.value("partial_rotary_factor")
    rotary.require("mrope_interleaved", interleaved, default=interleaved)
    settings = {
        "rope_base": rotary.number("rope_theta", theta),
        "rope_scaling": rope_scaling(config, rotary),
        "rope_sections": _rope_sections(rotary),
        "rope_interleaved": interleaved,
    }
    if is_supported(rotary):
        rotary.finish()
    return settings


def stated_rotary(config: ConfigSection) -> ConfigSection:
    """Return the section that holds: `rope_scaling`, the older name, takes the place of the newer one as a whole."""
    parameters, scaling = config.section("rope_parameters"), config.section("rope_scaling")
    return scaling or parameters


def rope_scaling(config: ConfigSection, scaled: ConfigSection) -> Settings | None:
    """Read the scaling of rotary frequencies in the section `scaled`; None if there is none."""
    kind = _kind(scaled)
    if kind in _UNSCALED_KINDS:
        return None
    if not is_supported(scaled):
        scaled.reject("rope_type", f'"{kind}" is not supported yet; supported: default, {", ".join(_SCALINGS)}')
        return None
    return {"kind": kind, "factor": scaled.number("factor"), **_SCALINGS[kind](config, scaled)}


def rope_scaling_config(scaling: Settings) -> dict[str, Any]:
    """Return the section of a config that says the same: the way back from `rope_scaling`."""
    keys = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
    if scaling["kind"] == "yarn":
        keys = {"low_freq_factor": "beta_slow", "high_freq_factor": "beta_fast", "amplitude": "attention_factor"}
    keys["original_positions"] = "original_max_position_embeddings"
    stated = {key: scaling[name] for name, key in keys.items() if scaling[name] is not None}
    return {"rope_type": scaling["kind"], "factor": scaling["factor"], **stated}


def _rope_sections(rotary: ConfigSection) -> tuple[int, ...] | None:
    """Read how many pairs of a head are rotated by time, row and column; None if there is one position for all."""
    sections = rotary.value("mrope_section")
    if sections is None:
        return None
    if isinstance(sections, list) and len(sections) == 3 and all(type(n) is int and n >= 1 for n in sections):
        return tuple(sections)
    rotary.reject("mrope_section", f"found {sections}, allowed: three whole numbers of at least 1")
    return None


def is_supported(scaled: ConfigSection) -> bool:
    """Return whether the scaling in this section is one that can be read."""
    return _kind(scaled) in (*_UNSCALED_KINDS, *_SCALINGS)


def _kind(scaled: ConfigSection) -> str:
    older_name = scaled.value("type")
    return str(scaled.value("rope_type") or older_name or "default")


def _linear(config: ConfigSection, scaled: ConfigSection) -> dict[str, Any]:
    return {"low_freq_factor": None, "high_freq_factor": None, "original_positions": None, "amplitude": None}


def _dynamic(config: ConfigSection, scaled: ConfigSection) -> dict[str, Any]:
    return {**_linear(config, scaled), "original_positions": _original_positions(config, scaled)}


def _llama3(config: ConfigSection, scaled: ConfigSection) -> dict[str, Any]:
    return {
        "low_freq_factor": scaled.number("low_freq_factor"),
        "high_freq_factor": scaled.number("high_freq_factor"),
        "original_positions": _original_positions(config, scaled),
        "amplitude": None,
    }


def _yarn(config: ConfigSection, scaled: ConfigSection) -> dict[str, Any]:
    scaled.require("truncate", True, default=True)
    ratio = _ratio_of_amplitudes(scaled)
    amplitude = ratio if scaled.value("attention_factor") is None else scaled.number("attention_factor")
    return {
        "low_freq_factor": _number_or(scaled, "beta_slow", _YARN_SLOW_TURNS),
        "high_freq_factor": _number_or(scaled, "beta_fast", _YARN_FAST_TURNS),
        "original_positions": _original_positions(config, scaled),
        "amplitude": amplitude,
    }


def _ratio_of_amplitudes(scaled: ConfigSection) -> float | None:
    """Return the amplitude that `mscale` and `mscale_all_dim` make together; one alone has no effect."""
    factor, scales = scaled.number("factor"), [scaled.value(key) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    numerator, denominator = (scaled.number(key) for key in ("mscale", "mscale_all_dim"))
    if factor <= 1:
        return 1.0
    return (0.1 * numerator * log(factor) + 1) / (0.1 * denominator * log(factor) + 1)


def _number_or(scaled: ConfigSection, key: str, default: float) -> float:
    return scaled.number(key) if scaled.value(key) else default


def _original_positions(config: ConfigSection, scaled: ConfigSection) -> int:
    """Return the context of pretraining; a config that does not state it means its own context."""
    key = "original_max_position_embeddings"
    if scaled.value(key) is None and config.value("max_position_embeddings") is not None:
        return config.integer("max_position_embeddings")
    return int(scaled.number(key))


_SCALINGS: Mapping[str, Callable[[ConfigSection, ConfigSection], dict[str, Any]]] = {
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
