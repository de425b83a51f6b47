"""Count the tokens of rendered conversations without encoding them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from mmtrain.data.text.chat_template import Span
from mmtrain.data.text.token_counter import TokenCounter

_MAX_CACHED_TEXTS = 1 << 16  # about ten megabytes
_MAX_CACHED_CHARACTERS = 64


@dataclass(frozen=True)
class RenderingCounts:
    """The tokens of a rendering, in which every medium has one feature token."""

    total: int
    targets: int
    added_tokens: tuple[str, ...]  # found in the rendering, in order


class RenderingCounter:
    """Counts texts between added tokens by their pieces: exact where a tokenizer cuts the added tokens out first."""

    def __init__(self, tokenizer: Tokenizer, added_token: re.Pattern[str], answer_header: str) -> None:
        """Count what `tokenizer` makes of renderings. `added_token` matches its added tokens, in one group."""
        self._counter = TokenCounter(tokenizer, texts_hold_added_tokens=False)
        self._counts = _TextCounts(self._counter)
        self._split = added_token.split
        self._text_before_answers = self._split(answer_header)[-1]
        added_tokens = tokenizer.get_added_tokens_decoder().values()
        takes_neighbours = any(token.lstrip or token.rstrip or token.single_word for token in added_tokens)
        is_normalized = tokenizer.normalizer is not None and any(token.normalized for token in added_tokens)
        self._is_exact = self._counter.knows_pieces and not takes_neighbours and not is_normalized

    def min_tokens(self, num_characters: int) -> int:
        """Return a lower bound on the tokens of a text of so many characters."""
        return self._counter.min_tokens(num_characters)

    def count(self, text: str, answers: Sequence[Span]) -> RenderingCounts | None:
        """Count the tokens of a rendering, and those in its answers; None if encoding must tell.

        Every answer starts right after the answer header and ends with an added token.
        """
        if not self._is_exact:
            return None
        targets = 0
        for start, end in answers:
            answer = text[start:end]
            if not self._counter.splits_between(self._text_before_answers, answer):
                return None  # the first token of the answer holds the end of the header
            targets += self._count_parts(self._split(answer))
        parts = self._split(text)
        return RenderingCounts(self._count_parts(parts), targets, tuple(parts[1::2]))

    def _count_parts(self, parts: Sequence[str]) -> int:
        """Count texts and the added tokens between them."""
        return sum(map(self._counts.__getitem__, parts[::2])) + len(parts) // 2


class _TextCounts(dict[str, int]):
    """Text between added tokens -> number of tokens; cached where short, as what templates write around texts is."""

    def __init__(self, counter: TokenCounter) -> None:
        super().__init__()
        self._counter = counter

    def __missing__(self, text: str) -> int:
        count = self._counter(text)
        if len(text) <= _MAX_CACHED_CHARACTERS and len(self) < _MAX_CACHED_TEXTS:
            self[text] = count
        return count
