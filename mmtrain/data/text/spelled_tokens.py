"""Spell tokens one by one, as the model reads them: with special tokens, and with the space before a word."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

_INCOMPLETE = "�"  # what decoders write for bytes that are no whole character
_MAX_PENDING_TOKENS = 8  # bytes of a character, and room: more that decode to nothing are spelled as nothing


@dataclass(frozen=True)
class SpelledToken:
    """A token as text. Of a character that several tokens make up, the last one has the text."""

    text: str
    is_special: bool  # whether its text is a name, which no text of the data becomes unless it is allowed to


def spell_tokens(tokenizer: Tokenizer, ids: Sequence[int]) -> list[SpelledToken]:
    """Spell each token of `ids` with the tokens before it in view, on which its leading space depends."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id: token.content for token_id, token in added.items() if token.special}
    texts = [""] * len(ids)
    start = 0  # of the tokens in view: those of the text before
    done = 0  # tokens that are spelled
    for end in range(1, len(ids) + 1):
        before, text = _decode(tokenizer, ids[start:done]), _decode(tokenizer, ids[start:end])
        is_last = end == len(ids) or ids[end] in special
        if not is_last and text.endswith(_INCOMPLETE) and end - done < _MAX_PENDING_TOKENS:
            continue
        texts[end - 1] = text[len(before) :] if text.startswith(before) else _decode(tokenizer, ids[done:end])
        start, done = done, end
    return [SpelledToken(special.get(i, text), i in special) for i, text in zip(ids, texts, strict=True)]


def _decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
    return text
