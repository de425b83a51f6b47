"""Count the tokens of texts, and of rendered conversations, without encoding them: about five times faster.

A byte-level BPE splits a text by a regular expression and merges only inside the pieces. So the number of tokens of a
text is the sum over its pieces, and texts repeat the same words. A tokenizer of another construction, or a text that is
not plain ASCII (where the regular expressions of two libraries might disagree), is encoded instead.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from mmtrain.data.text.chat_template import Span

# The default pattern of the pre-tokenizer `ByteLevel` (GPT-2).
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN3_5_PATTERN = _QWEN2_PATTERN.replace(r"]?\p{L}+", r"]?[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
# As they are written inside brackets. No mark (M) is in ASCII.
_ASCII_CLASSES = {r"\p{L}": "A-Za-z", r"\p{M}": "", r"\p{N}": "0-9"}
_PATTERN_PARTS = re.compile(r"\\p\{[LMN]\}|\\[^p]|\[\^?|\]|.", re.S)
_ASCII_KEEPING_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")
_KNOWN_ESCAPES = frozenset("srntSdDwW\\'\"[](){}.*+?|^$-/")
# Byte-level vocabularies write unprintable bytes as these characters.
_BYTE_LEVEL_CHARACTERS = {byte: 256 + byte for byte in range(33)} | {127: 256 + 33}
_MAX_CACHED_PIECES = 1 << 18  # some tens of megabytes
_MAX_CACHED_CHARACTERS = 64  # of one piece or text; longer ones hardly repeat
_MAX_CACHED_TEXTS = 1 << 16  # about ten megabytes


class TokenCounter:
    """Counts exactly the tokens into which `tokenizer` would encode a text, special tokens not parsed."""

    def __init__(self, tokenizer: Tokenizer, texts_hold_added_tokens: bool = True) -> None:
        """Find out whether the construction of the tokenizer permits counting by pieces.

        texts_hold_added_tokens: whether added tokens that are not special may be in the texts.
        """
        self._tokenizer = tokenizer
        config = json.loads(tokenizer.to_str())
        cuts_first = texts_hold_added_tokens and not all(token["special"] for token in config["added_tokens"])
        patterns = None if cuts_first else _split_patterns(config)
        self._pieces: _PieceCounts | None = None
        self._words: tuple[_WordCounts, _WordCounts] | None = None  # of the first word of a text, and of all others
        self._longest_token = _longest_token(config, counts_pieces=patterns is not None)
        self._splits_before: dict[tuple[str, str], bool] = {}
        self._looks_ahead_by_one = patterns is not None and _has_known_patterns(config)
        if patterns is not None:
            self._pieces = _PieceCounts(tokenizer.model, patterns)
            if _splits_at_spaces(config):
                self._words = _WordCounts(self._pieces, ""), _WordCounts(self._pieces, " ")

    @property
    def knows_pieces(self) -> bool:
        """Whether plain ASCII texts are counted by their pieces."""
        return self._pieces is not None

    def splits_between(self, before: str, after: str) -> bool:
        """Return whether the tokens of `before + after` are surely those of `before` and those of `after`."""
        key = (before, after[:2])  # the known patterns look at no more than one character after a piece
        if self._pieces is None or not self._looks_ahead_by_one or not "".join(key).isascii():
            return False
        splits = self._splits_before.get(key)
        if splits is None:
            splits = self._splits_before[key] = self._pieces.splits_at("".join(key), len(before))
        return splits

    def min_tokens(self, num_characters: int) -> int:
        """Return a lower bound on the tokens of a text, from its length and the longest token there is."""
        return 0 if self._longest_token is None else -(-num_characters // self._longest_token)

    def __call__(self, text: str) -> int:
        """Count the tokens of `text`."""
        if self._pieces is not None and text.isascii():
            try:
                return self._count_words(text) if text else 0
            except _NotSeparableError:
                with suppress(_NotSeparableError):
                    return self._pieces.count(text)
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _count_words(self, text: str) -> int:
        words = text.split(" ")
        if self._words is None or "" in words:
            raise _NotSeparableError
        first, others = self._words
        return first[words[0]] + sum(map(others.__getitem__, words[1:]))


class _NotSeparableError(Exception):
    """A text whose tokens are not the sum over its parts."""


class _PieceCounts(dict[str, int]):
    """Number of tokens of each piece of ASCII text; short pieces are cached, up to a limit."""

    def __init__(self, model: BPE, patterns: "list[re.Pattern[str]]") -> None:
        super().__init__()
        self._model = model
        self._splits = [pattern.findall for pattern in patterns]

    def count(self, text: str) -> int:
        """Count the tokens of a text. Raises `_NotSeparableError`."""
        return sum(map(self.__getitem__, self._split(text)))

    def splits_at(self, text: str, position: int) -> bool:
        """Return whether a piece of a text ends at a position."""
        try:
            return position in accumulate(map(len, self._split(text)), initial=0)
        except _NotSeparableError:
            return False

    def _split(self, text: str) -> list[str]:
        pieces = [text]
        for split in self._splits:
            pieces = [part for piece in pieces for part in split(piece)]
        if sum(map(len, pieces)) != len(text):  # a pattern leaves characters between its matches
            raise _NotSeparableError
        return pieces

    def __missing__(self, piece: str) -> int:
        count = len(self._model.tokenize(piece.translate(_BYTE_LEVEL_CHARACTERS)))
        if len(piece) <= _MAX_CACHED_CHARACTERS and len(self) < _MAX_CACHED_PIECES:
            self[piece] = count
        return count


class _WordCounts(dict[str, int]):
    """Word between single spaces -> number of tokens, with the space before it; cached as pieces are."""

    def __init__(self, pieces: _PieceCounts, space_before: str) -> None:
        super().__init__()
        self._pieces = pieces
        self._space_before = space_before

    def __missing__(self, word: str) -> int:
        if self._space_before and word[:1].isspace():  # a space before other white space belongs to that
            raise _NotSeparableError
        count = self._pieces.count(self._space_before + word)
        if len(word) <= _MAX_CACHED_CHARACTERS and len(self) < _MAX_CACHED_PIECES:
            self[word] = count
        return count


def _split_patterns(config: dict[str, Any]) -> "list[re.Pattern[str]] | None":
    """Return the patterns that split plain ASCII text, one after the other, into pieces; None if one is not known.

    config: the content of a `tokenizers` JSON file.
    """
    model = config["model"]
    normalizer = config["normalizer"]
    if normalizer is not None and normalizer["type"] not in _ASCII_KEEPING_NORMALIZERS:
        return None
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    *steps, last = _pre_tokenizer_steps(config)
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    patterns = [_step_pattern(step) for step in steps]
    if last["use_regex"]:
        patterns.append(_ascii_pattern(_GPT2_PATTERN))
    known = [pattern for pattern in patterns if pattern is not None]
    return known if len(known) == len(patterns) else None


def _longest_token(config: dict[str, Any], counts_pieces: bool) -> int | None:
    """Return the most characters of a text that become one token; None if that is not known."""
    model = config["model"]
    entries = model["vocab"]
    tokens = entries if isinstance(entries, dict) else [entry[0] for entry in entries]
    longest = max(map(len, [*tokens, *(token["content"] for token in config["added_tokens"])]))
    if counts_pieces:
        # Normalization may compose up to four characters to one, which has three bytes then.
        return longest if config["normalizer"] is None else -(-longest * 4 // 3)
    has_all_bytes = model.get("byte_fallback") and not {f"<0x{byte:02X}>" for byte in range(256)}.difference(tokens)
    pre_tokenizer = config["pre_tokenizer"]
    splits_nothing_off = pre_tokenizer is None or pre_tokenizer["type"] == "Metaspace"
    return longest if has_all_bytes and splits_nothing_off and _keeps_length(config["normalizer"]) else None


def _keeps_length(normalizer: dict[str, Any] | None) -> bool:
    """Return whether a normalized text surely has no fewer characters."""
    if normalizer is None or normalizer["type"] == "Prepend":
        return True
    if normalizer["type"] == "Sequence":
        return all(map(_keeps_length, normalizer["normalizers"]))
    is_replacement = normalizer["type"] == "Replace" and "String" in normalizer["pattern"]
    return is_replacement and len(normalizer["content"]) >= len(normalizer["pattern"]["String"])


def _has_known_patterns(config: dict[str, Any]) -> bool:
    """Return whether all patterns of the pre-tokenizer are those of GPT-2, Qwen or Llama 3, or split digits."""
    *steps, _ = _pre_tokenizer_steps(config)
    known = _GPT2_PATTERN, _QWEN2_PATTERN, _QWEN3_5_PATTERN, _LLAMA3_PATTERN
    return all(step["type"] == "Digits" or step["pattern"].get("Regex") in known for step in steps)


def _splits_at_spaces(config: dict[str, Any]) -> bool:
    """Return whether a piece surely starts at a single space that is followed by something else."""
    *steps, last = _pre_tokenizer_steps(config)
    if last["use_regex"]:
        return all(step["type"] == "Digits" for step in steps)
    return len(steps) == 1 and steps[0]["pattern"]["Regex"] in (_QWEN2_PATTERN, _QWEN3_5_PATTERN, _LLAMA3_PATTERN)


def _pre_tokenizer_steps(config: dict[str, Any]) -> list[dict[str, Any]]:
    pre_tokenizer = config["pre_tokenizer"] or {}
    if pre_tokenizer.get("type") == "Sequence":
        return list(pre_tokenizer["pretokenizers"])
    return [pre_tokenizer]


def _step_pattern(step: dict[str, Any]) -> "re.Pattern[str] | None":
    """Return the pattern by which one step of a pre-tokenizer splits; None if it is not known."""
    if step["type"] == "Digits":
        return _ascii_pattern(r"\p{N}|[^\p{N}]+" if step["individual_digits"] else r"\p{N}+|[^\p{N}]+")
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"] and "Regex" in step["pattern"]:
        return _ascii_pattern(step["pattern"]["Regex"])
    return None


def _ascii_pattern(pattern: str) -> "re.Pattern[str] | None":
    """Translate an Oniguruma pattern of classes L, M and N into Python's for ASCII text; return None where in doubt."""
    parts: list[str] = []
    in_brackets = False
    for part in _PATTERN_PARTS.findall(pattern):
        if part in _ASCII_CLASSES:
            if not in_brackets and not _ASCII_CLASSES[part]:
                return None
            parts.append(_ASCII_CLASSES[part] if in_brackets else f"[{_ASCII_CLASSES[part]}]")
            continue
        if part.startswith("\\") and len(part) == 2 and part[1] not in _KNOWN_ESCAPES:
            return None
        if part == "\\" or (in_brackets and part.startswith("[")):  # \P, \X, nested brackets: no tokenizer needs them
            return None
        if part == "]" and parts and parts[-1].startswith("[") and in_brackets:  # a bracket inside brackets
            return None
        in_brackets = part.startswith("[") or (in_brackets and part != "]")
        parts.append(part)
    try:
        compiled = re.compile("".join(parts), re.ASCII)
    except re.error:
        return None
    return compiled if compiled.groups == 0 else None


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
        """Return a lower bound on the tokens of a text of this number of characters."""
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
