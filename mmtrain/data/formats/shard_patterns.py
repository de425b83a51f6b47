"""Expand braces in names of shards, as a shell does."""

import re

from mmtrain.errors import DataError

_MAX_SHARDS_IN_RANGE = 1_000_000  # `{0..999999999999}` is a slip of the user's, and would fill the memory


def expand_braces(text: str) -> list[str]:
    """Return every text that `{a,b}` and `{000..123}` stand for, as in a shell.

    >>> expand_braces("x-{08..10}.{tar,txt}")[:3]
    ['x-08.tar', 'x-08.txt', 'x-09.tar']
    """
    braces = re.search(r"\{([^{}]*)\}", text)
    if braces is None:
        return [text]
    number_range = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if number_range is None:
        choices = braces[1].split(",")
    else:
        low = int(number_range[1])
        high = int(number_range[2])
        if high - low >= _MAX_SHARDS_IN_RANGE:
            raise DataError(f"{text}: names more than {_MAX_SHARDS_IN_RANGE} shards")
        num_digits = len(number_range[1])
        choices = [str(number).zfill(num_digits) for number in range(low, high + 1)]
    tails = expand_braces(text[braces.end() :])
    return [f"{text[: braces.start()]}{choice}{tail}" for choice in choices for tail in tails]
