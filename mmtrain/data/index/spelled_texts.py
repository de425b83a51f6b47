"""Count the samples whose texts spell special tokens, or marks of media, and in which these stay text."""

from collections import Counter

from mmtrain.data.formats.sample import LITERAL_START, Sample
from mmtrain.data.text.sample_tokenizer import SampleTokenizer
from mmtrain.recipe.settings.modalities import MODALITIES

_MAX_TOKENS_IN_REMARK = 5


class SpelledTexts:
    """Counts samples; a user who meant a token or a medium finds out that the model is not trained with it."""

    def __init__(self, tokenizer: SampleTokenizer | None = None) -> None:
        """Count what `tokenizer` leaves as text; without one, marks of media alone."""
        self._tokenizer = tokenizer
        self._num_samples: Counter[str] = Counter()  # by token that stays text
        self._num_marked: Counter[str] = Counter()  # by mark that is text

    def add(self, sample: Sample) -> None:
        """Count a usable sample."""
        if self._tokenizer is not None:
            self._num_samples.update(self._tokenizer.left_as_text(sample))
        text = "".join([turn.text for turn in sample.turns if LITERAL_START in turn.text])
        if text:
            marks = [mark for modality in MODALITIES.values() for mark in modality.marks.values()]
            self._num_marked.update(mark for mark in marks if LITERAL_START + mark[1:] in text)

    def remarks(self) -> tuple[str, ...]:
        """Return a line for tokens and one for marks, if there are any."""
        remarks = []
        if self._num_samples:
            remarks.append(
                f"texts of samples spell special tokens, which stay text: {_listed(self._num_samples)}; "
                "data.special_tokens says which texts may become tokens of a chat template"
            )
        if self._num_marked:
            remarks.append(
                f"texts of samples spell marks of media that they do not have, which stay text: "
                f"{_listed(self._num_marked)}"
            )
        return tuple(remarks)


def _listed(num_samples: Counter[str]) -> str:
    frequent = sorted(num_samples.items(), key=lambda entry: (-entry[1], entry[0]))
    listed = [
        f"{token} in {count:,} sample{'s' if count > 1 else ''}" for token, count in frequent[:_MAX_TOKENS_IN_REMARK]
    ]
    num_more = len(frequent) - len(listed)
    return ", ".join(listed) + (f", and {num_more} more" if num_more else "")
