"""Encode the items of a video, or the rows of an image, that a family writes with a text of its own between them."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from tokenizers import Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.text.chat_template import TIME, Span
from mmtrain.data.text.sample_tokenizer import MediaFeatures, MediumFeatures, TimedItems
from mmtrain.families.family import SECONDS, MediaMarkup
from mmtrain.recipe.settings.modalities import MediaKind


class ItemsApart:
    """The ids of the items or rows after the first one, which stands in the rendering of a conversation."""

    def __init__(self, markup: MediaMarkup, tokenizer: Tokenizer) -> None:
        """Encode as `markup` says.

        Its suffix starts with an added token, and so does what follows times in it, so that these are encoded apart.
        """
        self._markup, self._tokenizer = markup, tokenizer
        self._feature_id = tokenizer.token_to_id(markup.feature_token)
        self._items: dict[tuple[str, str], IntArray] = {}  # with one feature, by the suffix before and the text

    @classmethod
    def of(cls, markups: Mapping[MediaKind, MediaMarkup], tokenizer: Tokenizer) -> "ItemsApart | None":
        """Return None for a family that writes all items of a video as one, and all rows of an image.

        No family writes both apart.
        """
        apart = [markup for markup in markups.values() if (markup.later_prefix, markup.row_break) != (None, None)]
        assert len(apart) <= 1, "items and rows would be told apart by their kinds"
        return cls(apart[0], tokenizer) if apart else None

    def later_ids(self, medium: MediumFeatures) -> list[IntArray]:
        """Return the ids of each later item of a medium."""
        ids = []
        for item, num_features in zip(self._later_items(medium), _counts(medium)[1:], strict=True):
            ids.append(np.repeat(item, np.where(item == self._feature_id, num_features, 1)))
        return ids

    def num_text_tokens(self, medium: MediumFeatures) -> int:
        """Return how many ids of the later items of a medium are no features."""
        return sum(len(item) - 1 for item in self._later_items(medium))

    def num_suffix_tokens(self, medium: MediumFeatures) -> int:
        """Return how many ids the first item of a medium has behind its feature; rows have a suffix together."""
        return 0 if self._markup.row_break is not None else len(self._encode(self._suffix(medium, 0)))

    def write_first_times(
        self, text: str, spans: Sequence[Span], features: MediaFeatures
    ) -> tuple[str, tuple[Span, ...]]:
        """Write into a rendering when the first item of each video is shown; return it with the spans' new places.

        A rendering with more videos than there are stays as it is; it is rejected later.
        """
        slots = [place for place, character in enumerate(text) if character == TIME] if TIME in text else []
        timed = [medium for media in features.values() for medium in media if isinstance(medium, TimedItems)]
        if not slots or len(slots) > len(timed):
            return text, tuple(spans)
        times = [self._seconds(medium, 0) for medium in timed[: len(slots)]]
        pieces = text.split(TIME)
        written = pieces[0] + "".join(time + piece for time, piece in zip(times, pieces[1:], strict=True))
        shifts = [0]  # behind so many slots
        for time in times:
            shifts.append(shifts[-1] + len(time) - len(TIME))
        moved = [tuple(place + shifts[bisect_left(slots, place)] for place in span) for span in spans]
        return written, tuple((start, end) for start, end in moved)

    def _later_items(self, medium: MediumFeatures) -> list[IntArray]:
        items = []
        for place in range(1, len(_counts(medium))):
            text = self._markup.later_item(place + 1, self._seconds(medium, place))
            before = "" if self._markup.row_break is not None else self._suffix(medium, place - 1)
            items.append(self._item(before, text))
        return items

    def _item(self, before: str, text: str) -> IntArray:
        """Return the ids of a later item; `before` is the suffix of the item before it."""
        if (before, text) not in self._items:
            ids = self._encode(before + text)[len(self._encode(before)) :]
            self._items[before, text] = np.array(ids, dtype=np.int64)
        return self._items[before, text]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _suffix(self, medium: MediumFeatures, place: int) -> str:
        return self._markup.suffix.replace(SECONDS, self._seconds(medium, place))

    def _seconds(self, medium: MediumFeatures, place: int) -> str:
        """Return the time that is written of an item; an empty text if none is."""
        if not self._markup.writes_times:
            return ""
        assert isinstance(medium, TimedItems), "check_data_settings demands a data.video.sampling with times"
        return self._markup.seconds(medium.tenths[place])


def time_slots(markup_text: str) -> str:
    """Return what a markup writes, with `TIME` where a time is to be written."""
    return markup_text.replace(SECONDS, TIME)


def first_features(medium: MediumFeatures) -> int:
    """Return the LLM tokens of the first item of a medium."""
    return _counts(medium)[0]


def _counts(medium: MediumFeatures) -> tuple[int, ...]:
    """Return the features of each item; a medium of one item may be stated as a number."""
    if isinstance(medium, TimedItems):
        return medium.features
    return (medium,) if isinstance(medium, int) else medium
