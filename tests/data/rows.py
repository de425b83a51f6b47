"""Rows of a LLaVA-format file."""

from typing import Any

Row = dict[str, Any]


def row(text: str, answer: str, *images: str, name: str = "") -> Row:
    """Return the row of one question and answer about some images."""
    made: Row = {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": answer}]}
    if images:
        made["image"] = list(images)
    if name:
        made["id"] = name
    return made
