"""Encode the items of a video that a family writes one after another, each with a text of its own."""

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.text.chat_template import TIME, Span
from mmtrain.data.text.sample_tokenizer import MediaFeatures, MediumFeatures, TimedItems
from mmtrain.families.family import SECONDS, MediaMarkup


class ItemsApart:
    """The ids of the items after the first one, which stands in the rendering of a conversation."""

    def __init__(self, markup: MediaMarkup, tokenizer: Tokenizer) -> None:
        """Encode as `markup` says. Its suffix is made of added tokens, so that texts around it are encoded apart."""
        self._markup, self._tokenizer = markup, tokenizer
        self._feature_id = tokenizer.token_to_id(markup.feature_token)
        self.num_suffix_tokens = len(tokenizer.encode(markup.suffix, add_special_tokens=False).ids)
        self._items: dict[str, IntArray] = {}  # with one feature, by text

    @classmethod
    def of(cls, markup: MediaMarkup | None, tokenizer: Tokenizer) -> "ItemsApart | None":
        """Return None for a family that writes all items of a video as one."""
        return None if markup is None or markup.later_prefix is None else cls(markup, tokenizer)

    def later_ids(self, medium: MediumFeatures) -> list[IntArray]:
        """Return the ids of each later item of a medium."""
        ids = []
        for item, num_features in zip(self._later_items(medium), _counts(medium)[1:], strict=True):
            ids.append(np.repeat(item, np.where(item == self._feature_id, num_features, 1)))
        return ids

    def num_text_tokens(self, medium: MediumFeatures) -> int:
        """Return how many ids of the later items of a medium are no features."""
        return sum(len(item) - 1 for item in self._later_items(medium))

    def _later_items(self, medium: MediumFeatures) -> list[IntArray]:
        items = []
        for place in range(1, len(_counts(medium))):
            seconds = _seconds(medium, place) if self._markup.writes_times else ""
            items.append(self._item(self._markup.later_item(place + 1, seconds)))
        return items

    def _item(self, text: str) -> IntArray:
        if text not in self._items:
            behind_another = self._markup.suffix + text  # behind the suffix of the item before
            ids = self._tokenizer.encode(behind_another, add_special_tokens=False).ids[self.num_suffix_tokens :]
            self._items[text] = np.array(ids, dtype=np.int64)
        return self._items[text]


def time_slots(markup_text: str) -> str:
    """Return what a markup writes, with `TIME` where a time is to be written."""
    return markup_text.replace(SECONDS, TIME)


def write_first_times(text: str, spans: Sequence[Span], features: MediaFeatures) -> tuple[str, tuple[Span, ...]]:
    """Write into a rendering when the first item of each video is shown; return it with the spans where they are then.

    A rendering with more videos than there are stays as it is; it is rejected later.
    """
    slots = [place for place, character in enumerate(text) if character == TIME] if TIME in text else []
    timed = [medium for media in features.values() for medium in media if isinstance(medium, TimedItems)]
    if not slots or len(slots) > len(timed):
        return text, tuple(spans)
    times = [_seconds(medium, 0) for medium in timed[: len(slots)]]
    pieces = text.split(TIME)
    written = pieces[0] + "".join(time + piece for time, piece in zip(times, pieces[1:], strict=True))
    shifts = [0]  # behind so many slots
    for time in times:
        shifts.append(shifts[-1] + len(time) - len(TIME))
    moved = [tuple(place + shifts[bisect_left(slots, place)] for place in span) for span in spans]
    return written, tuple((start, end) for start, end in moved)


def first_features(medium: MediumFeatures) -> int:
    """Return the LLM tokens of the first item of a medium."""
    return _counts(medium)[0]


def _counts(medium: MediumFeatures) -> tuple[int, ...]:
    """Return the features of each item; a medium of one item may be stated as a number."""
    if isinstance(medium, TimedItems):
        return medium.features
    return (medium,) if isinstance(medium, int) else medium


def _seconds(medium: MediumFeatures, place: int) -> str:
    assert isinstance(medium, TimedItems), "check_data_settings demands data.video.sampling: ends"
    return f"{medium.tenths[place] / 10:.1f}"
