"""From conversations to token ids and labels, over a `tokenizers` JSON file.

The chat format, one line for reading only (nothing stands between the parts):

    <|system|>text<|end|> <|user|>text<|image|><|image|>text<|end|> <|assistant|>answer<|end|>
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Role, Sample
from mmtrain.data.text.token_counter import TokenCounter
from mmtrain.errors import DataError

PAD_TOKEN, END_TOKEN, IMAGE_TOKEN = "<|pad|>", "<|end|>", "<|image|>"
ROLE_TOKENS: dict[Role, str] = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIAL_TOKENS = (PAD_TOKEN, *ROLE_TOKENS.values(), END_TOKEN, IMAGE_TOKEN)
AUDIO_TOKEN = "<|audio|>"  # only models with an audio unit ask for it
IGNORE_INDEX = -100  # places that count in no loss


@dataclass(frozen=True)
class EncodedSample:
    """One sample as the LLM sees it; `labels[t]` is the token to predict at place t, `IGNORE_INDEX` where none is."""

    ids: IntArray  # (T,)
    labels: IntArray  # (T,)


class ChatTokenizer:
    """A byte-level BPE tokenizer that knows the chat format."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """Wrap a tokenizer; `name` stands in messages. Raises `DataError` if it lacks one of `SPECIAL_TOKENS`."""
        missing = [t for t in SPECIAL_TOKENS if tokenizer.token_to_id(t) is None]
        if missing:
            raise DataError(
                f"data.tokenizer: {name} lacks the special tokens {' '.join(missing)}; add them with "
                "`Tokenizer.add_special_tokens` of the `tokenizers` library, save it, and let model.llm.vocab cover it"
            )
        known = (
            [*SPECIAL_TOKENS, AUDIO_TOKEN] if tokenizer.token_to_id(AUDIO_TOKEN) is not None else list(SPECIAL_TOKENS)
        )
        tokenizer.add_special_tokens(known)  # marks known ones as special; their ids stay
        tokenizer.encode_special_tokens = True  # text that spells a special token is text, or users could forge turns
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._roles: dict[Role, int] = {role: self._special(token) for role, token in ROLE_TOKENS.items()}
        self.end_id = self._special(END_TOKEN)
        self.image_id = self._special(IMAGE_TOKEN)
        self.item_ids = {"vision": self.image_id}  # encoder unit -> the token that each of its features replaces
        if AUDIO_TOKEN in known:
            self.item_ids["audio"] = self._special(AUDIO_TOKEN)
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    @classmethod
    def load(cls, path: Path) -> "ChatTokenizer":
        """Read a `tokenizers` JSON file."""
        try:
            return cls(Tokenizer.from_str(path.read_text(encoding="utf-8")), str(path))
        except FileNotFoundError:
            raise DataError(f"data.tokenizer: {path}: no such file; expected a `tokenizers` JSON file") from None
        except DataError:
            raise
        except Exception as error:  # the library raises bare Exception for whatever it cannot parse
            raise DataError(f"data.tokenizer: {path}: not a `tokenizers` JSON file: {error}") from None

    def encode(self, sample: Sample, features: Sequence[int], clip_features: Sequence[int] = ()) -> EncodedSample:
        """Encode a whole sample: image or video i becomes `features[i]` image tokens; clips likewise.

        Labels are the answers' tokens and the `<|end|>` that closes each, moved one place ahead: the token to predict.
        """
        ids, is_target = self._encode_turns(sample, {"vision": features, "audio": clip_features})
        labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int64)
        labels[:-1] = np.where(is_target[1:], ids[1:], IGNORE_INDEX)
        return EncodedSample(ids, labels)

    def length_counter(self, most: int) -> Callable[[Sample, Sequence[int], Sequence[int]], tuple[int, int]]:
        """A function with the arguments of `encode` that tells how many ids and how many targets that would give.

        Texts that surely have more than `most` tokens are not looked at (megabytes of them take minutes, and memory a
        hundred times theirs): it tells what they have at least, and no targets.
        """
        count = TokenCounter(self._tokenizer)

        def tell(sample: Sample, features: Sequence[int], clip_features: Sequence[int]) -> tuple[int, int]:
            ids, targets = sum(features) + sum(clip_features), 0
            marked = len(IMAGE_MARK) * (len(features) + len(clip_features))  # all marks are as long
            least = count.min_tokens(sum([len(turn.text) for turn in sample.turns]) - marked)
            if least > most:
                return least, 0
            first, *others = _marks(sample)
            for turn in sample.turns:
                parts = [turn.text]
                if turn.role == "user":
                    parts = re.split("|".join((first, *others)), turn.text) if others else turn.text.split(first)
                body = sum(map(count, parts))
                ids += body + 2  # who speaks, and the end of it
                targets += body + 1 if turn.role == "assistant" else 0
            return ids, targets

        return tell

    def prompt_ids(self, sample: Sample, features: Sequence[int], clip_features: Sequence[int] = ()) -> IntArray:
        """Everything before the last answer, up to and including its `<|assistant|>`: where generation starts."""
        last = max((i for i, t in enumerate(sample.turns) if t.role == "assistant"), default=len(sample.turns))
        ids, _ = self._encode_turns(sample, {"vision": features, "audio": clip_features}, last)
        return np.append(ids, self._roles["assistant"])

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def _encode_turns(
        self, sample: Sample, features: Mapping[str, Sequence[int]], stop: int | None = None
    ) -> tuple[IntArray, np.ndarray]:
        """Ids of the turns before `stop`, and which of them are targets."""
        ids: list[int] = []
        is_target: list[bool] = []
        marks = _marks(sample)
        left = {unit: iter(counts) for unit, counts in features.items()}
        for turn in sample.turns[:stop]:
            answers = turn.role == "assistant"
            body = self._with_items(turn.text, marks, left) if turn.role == "user" else self._text(turn.text)
            ids += [self._roles[turn.role], *body, self.end_id]
            is_target += [False, *[answers] * (len(body) + 1)]
        return np.array(ids, dtype=np.int64), np.array(is_target, dtype=bool)

    def _with_items(self, text: str, marks: Mapping[str, str], left: Mapping[str, Iterator[int]]) -> list[int]:
        ids: list[int] = []
        for part in re.split(f"({'|'.join(marks)})", text):
            if part in marks:
                unit = marks[part]
                ids += [self.item_ids[unit]] * next(left[unit])
            else:
                ids += self._text(part)
        return ids

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _special(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)


def _marks(sample: Sample) -> dict[str, str]:
    """What stands for an item in its user turns -> the item's unit.

    Without clips an `<audio>` is text, as it was to whoever wrote data before there was sound; so with videos.
    """
    marks = {IMAGE_MARK: "vision"}
    marks |= {VIDEO_MARK: "vision"} if sample.videos else {}
    marks |= {AUDIO_MARK: "audio"} if sample.clips else {}
    return marks
