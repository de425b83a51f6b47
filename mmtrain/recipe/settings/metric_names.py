"""Names of metrics, which score answers to held-out questions."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator

TEXT_METRICS = ("exact", "contains", "anls", "f1", "wer")
REGEX_PREFIX = "regex="
METRICS_ALLOWED = f"{', '.join(TEXT_METRICS)}, {REGEX_PREFIX}PATTERN"
LOWER_IS_BETTER = ("wer",)
_PLUGIN_NAME = re.compile(r"[\w.-]+(:[\w.]+)?")


def check_metric_name(name: str) -> str:
    """Return the name of a metric. Raises ValueError for one that can name none."""
    if name.startswith(REGEX_PREFIX):
        pattern = name.removeprefix(REGEX_PREFIX)
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"found {name!r}, whose pattern cannot be read: {error}; correct it") from None
        if compiled.match("") is not None:
            raise ValueError(f"found {name!r}, whose pattern matches the empty text, and so any; allowed: one of text")
    elif name == "regex":
        raise ValueError(r"found 'regex' without a pattern; write it behind: 'regex=answer is (\w+)'")
    elif not _PLUGIN_NAME.fullmatch(name):
        raise ValueError(f"found {name!r}; allowed: {METRICS_ALLOWED}, the name of a plug-in, or module:function")
    return name


def shown_metric_name(name: str) -> str:
    """Return the name of a metric in results: a pattern's is `regex`, a function's is without its module."""
    return "regex" if name.startswith(REGEX_PREFIX) else name.rpartition(":")[2]


def higher_is_better(shown_name: str) -> bool | None:
    """Return whether a higher score is better, by the metric's name in results; None for plug-ins, which may be any."""
    if shown_name not in (*TEXT_METRICS, shown_metric_name(REGEX_PREFIX)):
        return None
    return shown_name not in LOWER_IS_BETTER


def check_metric_names(names: Sequence[str]) -> Sequence[str]:
    """Return the names. Raises ValueError if results would not tell two patterns apart."""
    patterns = [name for name in names if name.startswith(REGEX_PREFIX)]
    if len(patterns) > 1:
        raise ValueError(f"found {len(patterns)} patterns, {' and '.join(map(repr, patterns))}; allowed: one")
    return names


MetricName = Annotated[str, AfterValidator(check_metric_name)]
MetricNames = Annotated[tuple[MetricName, ...], AfterValidator(check_metric_names)]
