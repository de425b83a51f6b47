"""Parse JSON that others wrote: every fault of it is one kind of error."""

import json
from typing import Any


def parse_json(content: bytes | str) -> Any:
    """Parse JSON, UTF-8 where it is bytes. Raises ValueError for every fault, also for bombs of brackets or digits."""
    try:
        return json.loads(content.decode("utf-8-sig") if isinstance(content, bytes) else content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
