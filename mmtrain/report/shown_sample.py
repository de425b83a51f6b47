"""Samples as the model reads and learns them, ready to be drawn: spans of text, and media as pictures."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]  # (height, width, 3)
TokenKind = Literal["text", "special", "medium", "predicted"]  # `predicted`: learned, and not read


@dataclass(frozen=True)
class ShownToken:
    """A token as text; that of a medium has the name of its unit."""

    id: int
    text: str
    kind: TokenKind
    is_learned: bool


@dataclass(frozen=True)
class ShownMedium:
    """A medium as its unit gets it."""

    title: str
    details: str  # sizes and counts
    pictures: tuple[Pixels, ...]  # the picture, tiles, frames, or spectrograms
    num_left_out: int = 0  # pictures beyond those that are drawn
    problem: str | None = None  # why there is nothing to draw


@dataclass(frozen=True)
class ShownSample:
    """A sample as it trains; one that cannot be used has a problem alone."""

    title: str
    remarks: tuple[str, ...]
    counts: Mapping[str, int]  # LLM tokens, learned tokens, and those of each unit
    tokens: tuple[ShownToken, ...] = ()
    media: tuple[ShownMedium, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class TokenRun:
    """Tokens beside each other that are drawn alike."""

    kind: TokenKind
    is_learned: bool
    tokens: tuple[ShownToken, ...]

    @property
    def text(self) -> str:
        """Their text; that of a medium's tokens is said once."""
        if self.kind == "medium":
            return f"[{self.tokens[0].text} × {len(self.tokens):,}]"
        return "".join(token.text for token in self.tokens)


def token_runs(tokens: Iterable[ShownToken]) -> Iterator[TokenRun]:
    """Yield the runs of tokens that are drawn alike, in order."""
    for (kind, is_learned, _), run in groupby(tokens, _likeness):
        yield TokenRun(kind, is_learned, tuple(run))


def _likeness(token: ShownToken) -> tuple[TokenKind, bool, str]:
    return token.kind, token.is_learned, token.text if token.kind == "medium" else ""


def shown_samples_json(samples: Iterable[ShownSample]) -> list[dict[str, Any]]:
    """Return samples as JSON has them: runs of tokens with their ids, and media without their pictures."""
    return [
        {
            "title": sample.title,
            "problem": sample.problem,
            "remarks": list(sample.remarks),
            "counts": dict(sample.counts),
            "text": [
                {
                    "text": run.text,
                    "kind": run.kind,
                    "learned": run.is_learned,
                    "ids": [token.id for token in run.tokens],
                }
                for run in token_runs(sample.tokens)
            ],
            "media": [
                {"title": medium.title, "details": medium.details, "problem": medium.problem} for medium in sample.media
            ],
        }
        for sample in samples
    ]
