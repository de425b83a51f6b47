"""What in a cost table contradicts itself or is incomplete, and how its errors are written.

A curve through contradictory samples predicts neither of them, and of two entries for one thing the later would be
taken in silence. So a table that holds such entries is refused when it is read, before planning starts.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mmtrain.costs.cost_model import TokenLoad

# Repeats of one load differ by noise and by the layout of its sequences. Steps of one plan took up to 2.9 times as long
# on another day (docs/measurements/2026-11-21.md); more than this is no measurement of the same thing.
MAX_RATIO_OF_REPEATS = 10.0


def require_consistent_load(tokens: int, sum_sq: int, max_len: int, num_sequences: int) -> None:
    """Raise ValueError if no sequences have this many tokens, this longest length, and this sum of squared lengths."""
    found = f"{tokens} tokens in {num_sequences} sequences of at most {max_len}, sum of squares {sum_sq}"
    if not 1 <= num_sequences <= tokens:
        raise ValueError(f"no such load: {found}; num_sequences must be 1 to the number of tokens")
    if not max_len <= tokens <= max_len * num_sequences:
        raise ValueError(f"no such load: {found}; max_len must be at most tokens and at least tokens / num_sequences")
    if not tokens**2 <= sum_sq * num_sequences or not max_len**2 <= sum_sq <= tokens * max_len:
        raise ValueError(
            f"no such load: {found}; sum_sq must be at least tokens^2 / num_sequences and max_len^2, and at most "
            "tokens * max_len"
        )


def require_same_passes(samples: Sequence[tuple[int, Collection[str]]]) -> None:
    """Raise ValueError unless all samples of a layer, given by tokens, have the same passes: a curve needs them all."""
    first_tokens, first_passes = samples[0]
    for tokens, passes in samples[1:]:
        if different := sorted(set(first_passes) ^ set(passes)):
            raise ValueError(
                f"{', '.join(different)} is stated at one of {first_tokens} and {tokens} tokens only; every sample of "
                "a layer must state the same passes"
            )


def require_repeatable(samples: Sequence[tuple[TokenLoad, float]]) -> None:
    """Raise ValueError if two samples of one load contradict each other; the samples are given with their forwards."""
    seconds_by_load: dict[TokenLoad, list[float]] = {}
    for load, seconds in samples:
        seconds_by_load.setdefault(load, []).append(seconds)
    for load, repeats in seconds_by_load.items():
        if max(repeats) > MAX_RATIO_OF_REPEATS * min(repeats):
            raise ValueError(
                f"contradictory samples of the same load ({load.tokens} tokens in {load.num_sequences} sequences): its "
                f"forward takes {min(repeats):.3g} s and {max(repeats):.3g} s"
            )


def require_distinct(where: str, names: Sequence[str]) -> None:
    """Raise ValueError if two entries are for the same thing."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"{where} holds {repeated[0]} twice, and only one of them can hold; remove the other")


def describe_invalid_table(error: ValidationError, path: Path) -> str:
    """Describe the first error of a table, where it lies, which layer or message that is, and how many errors follow.

    path: of the table, which is read again to name the entry.
    """
    first, *others = error.errors()
    location = first["loc"]
    where = ".".join(str(part) for part in location) or "the file"
    if entry := _name_of_entry(path, location):
        where += f" ({entry})"
    found = "null" if first["input"] is None else first["input"]
    value = f" (found {found})" if isinstance(found, int | float | str) else ""
    message = first["msg"].removeprefix("Value error, ")
    more = f"; {len(others)} more error{'s' * (len(others) > 1)} in this file" if others else ""
    return f"{where}: {message}{value}{more}"


def _name_of_entry(path: Path, location: Sequence[int | str]) -> str:
    """Name the layer or message with an error, and the tokens of its sample; empty where the file does not say."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    parts: list[str] = []
    for key in location:
        content = _child(content, key)
        if isinstance(content, Mapping):
            parts += _names(content)
    return ", ".join(parts)


def _child(content: Any, key: int | str) -> Any:
    try:
        return content[key]
    except (KeyError, IndexError, TypeError):
        return None


def _names(content: Mapping[str, Any]) -> list[str]:
    """Return what identifies an object of a table: kind and tp of a layer, kind and size of a message, tokens."""
    layer = content.get("layer")
    if isinstance(layer, Mapping):
        tp = f" tp{content['tp']}" if "tp" in content else ""
        return [f"{layer.get('kind')}{tp}"]
    if "kind" in content and "size" in content:
        return [f"{content['kind']} of {content['size']} ranks"]
    return [f"{content['tokens']} tokens"] if "tokens" in content else []
