"""Convert single values of other trainers' configurations; each rule is named in the table of their keys."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from mmtrain.models.shapes.freezing import LINEAR_PATTERNS

SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
    "wsd": "wsd",
    "inverse_sqrt": "inverse_sqrt",
    "inverse-square-root": "inverse_sqrt",
}
ATTENTION = {
    "flash_attention_2": "flash_attn",
    "fa2": "flash_attn",
    "flash_attn": "flash_attn",
    "flash": "auto",
    "flash_attention_3": "flash_attn_3",
    "sdpa": "sdpa",
    "eager": "reference",
    "auto": "auto",
}
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
ALL_LINEARS = ("all", "all-linear", "all_linear")


class NoMatchError(Exception):
    """A value that has no match here; the message says why."""


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise NoMatchError(f"{value!r} is no number") from None


def _whole(value: Any) -> int:
    number = _number(value)
    if number != int(number):
        raise NoMatchError(f"{value!r} is no whole number")
    return int(number)


def _positive(value: Any) -> int:
    number = _whole(value)
    if number < 1:
        raise NoMatchError(f"{value!r} stands for no number")
    return number


def is_true(value: Any) -> bool:
    """Return whether a flag is set; on a command line `true` and `1` are texts."""
    return value is True or str(value).lower() in ("true", "1", "yes", "on")


def _flag(value: Any) -> bool:
    if not is_true(value) and str(value).lower() not in ("false", "0", "no", "off", "none"):
        raise NoMatchError(f"{value!r} is neither true nor false")
    return is_true(value)


def _path(value: Any) -> str:
    if not isinstance(value, str):
        raise NoMatchError(f"{value!r} is no name of a file or folder")
    return value


def _name(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", str(value)).strip("-._") or "converted"


def _choice(choices: Mapping[str, str], value: Any) -> str:
    text = str(value).lower()
    if text not in choices:
        raise NoMatchError(f"there is no {value}; allowed here: {', '.join(dict.fromkeys(choices.values()))}")
    return choices[text]


def as_list(value: Any) -> list[Any]:
    """Return the entries of a list, which command lines write with commas or spaces."""
    if isinstance(value, list):
        return [entry for item in value for entry in as_list(item)] if all(isinstance(v, str) for v in value) else value
    return [entry.strip() for entry in value.split(",") if entry.strip()] if isinstance(value, str) else [value]


def _loggers(value: Any) -> list[str]:
    names = [str(name).lower() for name in as_list(value)]
    if names in (["none"], []):
        return []
    known = [name for name in names if name in TRACKERS]
    if not known:
        raise NoMatchError(f"there is no {value}; allowed here: {', '.join(TRACKERS)}")
    return known


def _targets(value: Any) -> list[str]:
    names = [str(name).strip("'\"[]") for name in as_list(value)]
    if any(name in ALL_LINEARS for name in names):
        return ["llm.*.linear_*"]
    unknown = [name for name in names if name not in LINEAR_PATTERNS]
    if unknown:
        raise NoMatchError(f"there is no linear {', '.join(unknown)}; known: {', '.join(LINEAR_PATTERNS)}")
    return list(dict.fromkeys(LINEAR_PATTERNS[name] for name in names))


def _clip(value: Any) -> float | None:
    return _number(value) or None  # 0 stands for no clipping


def _fraction(value: Any) -> float:
    fraction = _number(value)
    if not 0 < fraction < 1:
        raise NoMatchError(f"{value!r} is no share of the samples")
    return fraction


RULES: Mapping[str, Callable[[Any], Any]] = {
    "int": _whole,
    "steps": _positive,
    "float": _number,
    "bool": _flag,
    "path": _path,
    "name": _name,
    "samples": lambda value: {"samples": _positive(value)},
    "schedule": lambda value: _choice(SCHEDULES, value),
    "attention": lambda value: _choice(ATTENTION, value),
    "loggers": _loggers,
    "targets": _targets,
    "clip": _clip,
    "fraction": _fraction,
}


def convert_value(rule: str, value: Any) -> Any:
    """Convert a value by a rule of the table: a name in `RULES`, `choice:a=b;c=d`, or `on:value` for flags.

    Raises:
        NoMatchError: the value has no match; for a flag that is off, nothing is to be set.
    """
    name, _, argument = rule.partition(":")
    if name == "choice":
        return _choice(dict(pair.split("=") for pair in argument.split(";")), value)
    if name == "on":
        if str(value).lower() in ("false", "0", "none"):
            raise NoMatchError("")
        return {"false": False, "true": True}.get(argument, argument)
    return RULES[name](value)
