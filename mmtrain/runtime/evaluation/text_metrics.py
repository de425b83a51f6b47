"""Compare an answer with the right one by customary metrics, as lmms-eval 0.7.2 defines them.

Read `METRICS` first. Each metric counts points out of a number of parts. The score of an answer is their quotient, and
that of many answers the quotient of the sums.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ANLS_THRESHOLD = 0.5  # of similarity, below which an answer is wrong (Biten et al., 2019)
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: ord(" ")}  # to ASCII
_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))


class Points(NamedTuple):
    """What an answer reaches by one metric, and out of how much."""

    reached: float
    parts: int = 1


@dataclass(frozen=True)
class TextMetric:
    """A metric of two texts by its name in a recipe."""

    name: str
    compare: Callable[[str, str], Points]  # the expected and the given answer

    def score(self, pairs: Iterable[tuple[str, str]]) -> float:
        """Return the score of (expected, answered), 0 if there are none. Higher is better, except for `wer`."""
        points = [self.compare(expected, answered) for expected, answered in pairs]
        return sum(of_one.reached for of_one in points) / max(1, sum(of_one.parts for of_one in points))


def exact(expected: str, answered: str) -> Points:
    """Return 1 for the same text, character by character.

    Source: `exact_match` of lmms-eval without its options, which is that of Hugging Face's `evaluate`.

    >>> exact("red", "red").reached, exact("red", "Red").reached
    (1.0, 0.0)
    """
    return Points(float(answered == expected))


def contains(expected: str, answered: str) -> Points:
    """Return 1 if the answer holds the expected text somewhere, whatever the case, line breaks and full-width forms.

    Source: OCRBench (Liu et al., 2023, arXiv:2305.07895), as the task `ocrbench` of lmms-eval has it.

    >>> contains("red", "It is Red.").reached
    1.0
    """
    return Points(float(_searchable(expected) in _searchable(answered)))


def anls(expected: str, answered: str) -> Points:
    """Return 1 less the edit distance by the longer text's characters; 0 if that is below `ANLS_THRESHOLD`.

    Case and repeated space make no distance, but count as length. Source: average normalized Levenshtein similarity of
    ST-VQA and DocVQA (Biten et al., 2019, arXiv:1905.13648), as `anls` of lmms-eval has it.

    >>> anls("word", "Sword").reached
    0.8
    """
    length = max(len(expected), len(answered))
    distance = edit_distance(_single_spaced(expected), _single_spaced(answered))
    similarity = 1 - distance / length if length else 1.0
    return Points(similarity if similarity >= ANLS_THRESHOLD else 0.0)


def f1(expected: str, answered: str) -> Points:
    """Return the harmonic mean of precision and recall of the answer's words; their order does not count.

    Words are lower case, without punctuation and English articles. If either text has none, the score is 1 if both have
    none. Source: SQuAD 2.0 (Rajpurkar et al., 2018, arXiv:1806.03822), as the task `mmsearch` of lmms-eval has it.

    >>> f1("a cat on a mat", "on the mat").reached
    0.8
    """
    expected_words, answered_words = _squad_words(expected), _squad_words(answered)
    if not expected_words or not answered_words:
        return Points(float(expected_words == answered_words))
    num_common = (Counter(expected_words) & Counter(answered_words)).total()
    return Points(2 * num_common / (len(expected_words) + len(answered_words)))


def wer(expected: str, answered: str) -> Points:
    """Return how many words must be replaced, inserted or deleted, out of the words expected: lower is better.

    Of many answers it is the edits of all by the words of all. Words are lower case, without symbols and text in
    brackets (the basic normalizer of Whisper, Radford et al., 2022, arXiv:2212.04356). Source: the task `librispeech`
    of lmms-eval for languages other than English and Chinese, which have normalizers of their own there.

    >>> wer("three blind mice", "Three mice!")
    Points(reached=1.0, parts=3)
    """
    expected_words, answered_words = _spoken_words(expected), _spoken_words(answered)
    return Points(float(edit_distance(expected_words, answered_words)), len(expected_words))


def regex(pattern: str) -> Callable[[str, str], Points]:
    """Return a metric that is 1 if what `pattern` first finds in the answer is the expected text.

    It is the first group with text, or all of the match, without space around it. An expected text in which the pattern
    finds something stands for what it finds. Source: `RegexFilter` of lmms-eval and lm-evaluation-harness, followed by
    `exact_match`.

    >>> regex(r"Answer: (\\w+)")("B", "I think so. Answer: B").reached
    1.0
    """
    compiled = re.compile(pattern)

    def extract(text: str) -> str | None:
        match = compiled.search(text)
        if match is None:
            return None
        with_text = [group for group in match.groups() if group]
        return (with_text[0] if with_text else match[0]).strip()

    def compare(expected: str, answered: str) -> Points:
        extracted = extract(answered)
        target = extract(expected) or expected
        return Points(float(extracted is not None and extracted == target))

    return compare


METRICS: dict[str, Callable[[str, str], Points]] = {
    "exact": exact,
    "contains": contains,
    "anls": anls,
    "f1": f1,
    "wer": wer,
}


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Return the fewest replacements, insertions and deletions that make `second` of `first` (Levenshtein, 1966).

    A row of the table is computed at once: an answer of 4,000 characters takes a tenth of a second.

    >>> edit_distance("kitten", "sitting")
    3
    """
    codes: dict[Hashable, int] = {}
    first_codes, second_codes = (
        np.array([codes.setdefault(item, len(codes)) for item in items], dtype=np.int64) for items in (first, second)
    )
    steps = np.arange(len(second) + 1)
    row = steps
    for code in first_codes:
        best = row + 1
        best[1:] = np.minimum(best[1:], row[:-1] + (second_codes != code))
        row = np.minimum.accumulate(best - steps) + steps  # insertions, each a step to the right
    return int(row[-1])


def _searchable(text: str) -> str:
    return text.translate(_FULL_WIDTH).lower().strip().replace("\n", " ")


def _single_spaced(text: str) -> str:
    return " ".join(text.lower().split())


def _squad_words(text: str) -> list[str]:
    plain = text.lower().translate(_PUNCTUATION)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _spoken_words(text: str) -> list[str]:
    spoken = re.sub(r"[<\[][^>\]]*[>\]]", "", text.lower())
    spoken = re.sub(r"\([^)]+\)", "", spoken)
    letters = unicodedata.normalize("NFKC", spoken)
    return "".join(" " if unicodedata.category(letter)[0] in "MSP" else letter for letter in letters).lower().split()
