"""Encode the items of a video that a family writes one after another, each with a text of its own."""

import numpy as np
from tokenizers import Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.families.media_markup import MediaMarkup


class ItemsApart:
    """The ids of the items after the first one, which stands in the rendering of a conversation."""

    def __init__(self, markup: MediaMarkup, tokenizer: Tokenizer) -> None:
        """Encode as `markup` says. Its suffix is made of added tokens, so that texts around it are encoded apart."""
        self._markup, self._tokenizer = markup, tokenizer
        self._feature_id = tokenizer.token_to_id(markup.feature_token)
        self.num_suffix_tokens = len(tokenizer.encode(markup.suffix, add_special_tokens=False).ids)
        self._items: dict[int, IntArray] = {}  # with one feature, by number

    @classmethod
    def of(cls, markup: MediaMarkup | None, tokenizer: Tokenizer) -> "ItemsApart | None":
        """Return None for a family that writes all items of a video as one."""
        return None if markup is None or markup.later_prefix is None else cls(markup, tokenizer)

    def ids(self, number: int, num_features: int) -> IntArray:
        """Return the ids of a later item; `number` counts from 1."""
        item = self._item(number)
        return np.repeat(item, np.where(item == self._feature_id, num_features, 1))

    def num_text_tokens(self, number: int) -> int:
        """Return how many ids of a later item are no features."""
        return len(self._item(number)) - 1

    def _item(self, number: int) -> IntArray:
        if number not in self._items:
            text = self._markup.suffix + self._markup.later_item(number)  # behind the suffix of the item before
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids[self.num_suffix_tokens :]
            self._items[number] = np.array(ids, dtype=np.int64)
        return self._items[number]
