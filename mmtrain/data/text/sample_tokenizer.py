"""What every tokenizer of conversations offers: ids with labels, a fast count of them, prompts, and decoding."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import Sample
from mmtrain.data.text.greedy_settings import GreedySettings
from mmtrain.data.text.spelled_tokens import SpelledToken
from mmtrain.recipe.settings.generator_settings import GeneratorSettings
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES

IGNORE_INDEX = -100  # label of positions that do not count in the loss, as in torch's cross_entropy


@dataclass(frozen=True)
class TimedItems:
    """The items of a video whose text says when each is shown."""

    features: tuple[int, ...]  # LLM tokens of each
    tenths: tuple[int, ...]  # of a second from the start of the video, of each


# LLM tokens of a medium, of all encoders together; of a video those of each item, since families write text in between,
# and of an image those of each row where a family does so there.
MediumFeatures = int | tuple[int, ...] | TimedItems
# By modality, of each medium in the order of the media's marks. Under `GENERATOR`: the queries of each image to draw.
MediaFeatures = Mapping[str, Sequence[MediumFeatures]]
LengthCounter = Callable[[Sample, MediaFeatures], tuple[int, int]]  # -> (number of ids, number of targets)


@dataclass(frozen=True)
class EncodedSample:
    """One sample as the LLM sees it; `labels[t]` is the token to predict at position t, or `IGNORE_INDEX`."""

    ids: IntArray  # (T,)
    labels: IntArray  # (T,)


class BadConversationError(Exception):
    """A conversation that a tokenizer cannot encode; the message is the reason, for the quarantine."""

    def __init__(self, reason: str, kind: str = "chat_template") -> None:
        """Give the reason, and its kind: a key of `QUARANTINE_REASONS`."""
        super().__init__(reason)
        self.kind = kind


class SampleTokenizer(Protocol):
    """Encodes samples. `encode`, its counter and `prompt_ids` raise `BadConversationError`."""

    item_ids: dict[str, tuple[int, ...]]  # modality -> the tokens whose places features of its encoders take
    query_id: int | None  # the token whose places the queries of an image to draw take; None: there is none
    end_ids: frozenset[int]  # tokens that end an answer
    greedy: GreedySettings  # how greedy answers of its model are generated
    vocab_size: int  # one more than the largest id
    warnings: tuple[str, ...]  # what the user should know before training with it
    writes_items_apart: bool  # whether text stands between the items of a video
    writes_rows_apart: bool  # whether text stands between the rows of an image, whose features are then stated by row
    writes_times: bool  # whether this text says when they are shown, so that it needs `TimedItems`

    def encode(self, sample: Sample, features: MediaFeatures) -> EncodedSample:
        """Encode all turns; medium i of a modality becomes `features[modality][i]` of the modality's tokens.

        Labels are the tokens of the answers, each with the token that ends it, one position ahead. An image in an
        answer becomes a token that starts it, `features[GENERATOR][i]` queries and a token that ends it. Only the first
        is a label: the generator learns from the queries.
        """

    def length_counter(self, max_tokens: int) -> LengthCounter:
        """Return a function that counts the ids and targets that `encode` would return for the same arguments.

        For texts that surely have more than `max_tokens` tokens, it returns a lower bound and no targets without
        reading them. Megabytes of text take minutes, and a hundred times their size in memory.
        """

    def prompt_ids(self, sample: Sample, features: MediaFeatures) -> IntArray:
        """Encode everything before the last answer, up to where generation starts."""

    def left_as_text(self, sample: Sample) -> set[str]:
        """Return the special tokens that texts of a sample spell and that stay text, not those of what media become."""

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of the ids without special tokens."""

    def spell(self, ids: Sequence[int] | IntArray) -> list[SpelledToken]:
        """Return each of the ids as text, special tokens by their names."""

    def final_answer(self, ids: Sequence[int] | IntArray) -> str:
        """Return the text of a generated answer behind its thoughts, without space around it."""

    def final_text(self, text: str) -> str:
        """Return what an answer says behind its thoughts, as data spells it, without space around it."""

    def describe_missing_item_token(self, modality: str) -> str:
        """Say what the tokenizer lacks, and what to do, if `item_ids` has no entry for a modality."""


def last_answer_ids(tokenizer: SampleTokenizer, sample: Sample, features: MediaFeatures) -> IntArray:
    """Return what a perfect model generates behind `prompt_ids`: the last answer as it is learned, with its end.

    Turns behind it are left out, since they are unknown where it is generated. Raises `BadConversationError`.
    """
    last = sample.last_answer
    assert last is not None, "samples without an answer are quarantined"
    turns = [replace(turn, is_learned=number == last) for number, turn in enumerate(sample.turns[: last + 1])]
    labels = tokenizer.encode(replace(sample, turns=tuple(turns)), features).labels
    answer: IntArray = labels[labels != IGNORE_INDEX]
    return answer


def total_features(features: MediumFeatures) -> int:
    """Return the LLM tokens of a medium."""
    if isinstance(features, TimedItems):
        return sum(features.features)
    return features if isinstance(features, int) else sum(features)


ItemTenths = Sequence[int] | None  # when each item of a video is shown, in tenths of seconds; None: not known


def split_videos(
    features: dict[str, list[int]], sample: Sample, items_of: Callable[[str, int], tuple[int, ItemTenths]]
) -> dict[str, list[MediumFeatures]]:
    """Divide the LLM tokens of a sample's videos over their items, which are equal; the last has a newline's too.

    items_of: returns how many items a medium has, and when they are shown, by its modality and its number among the
        media of that.
    """
    divided: dict[str, list[MediumFeatures]] = {}
    for modality, counts in features.items():
        divided[modality] = list(counts)
        kinds = [kind for kind, _ in sample.media_of(MODALITIES[modality].media)] if sample.videos else []
        for number, (kind, count) in enumerate(zip(kinds, counts, strict=False)):
            if kind == "video":
                num_items, tenths = items_of(modality, number)
                of_each = count // num_items
                of_items = (of_each,) * (num_items - 1) + (count - of_each * (num_items - 1),)
                divided[modality][number] = of_items if tenths is None else TimedItems(of_items, tuple(tenths))
    return divided


def split_images(
    features: MediaFeatures, sample: Sample, rows_of: Callable[[str, int], int]
) -> dict[str, Sequence[MediumFeatures]]:
    """Divide the LLM tokens of a sample's images over their rows, which are equal.

    rows_of: returns how many rows of features a medium has, by its modality and its number among the media of that.
    """
    divided: dict[str, Sequence[MediumFeatures]] = dict(features)
    for modality, counts in features.items():
        kinds = [kind for kind, _ in sample.media_of(MODALITIES[modality].media)]
        if "image" not in kinds:
            continue
        of_media = list(counts)
        for number, (kind, count) in enumerate(zip(kinds, counts, strict=False)):
            if kind == "image":
                num_rows = rows_of(modality, number)
                of_media[number] = (total_features(count) // num_rows,) * num_rows
        divided[modality] = of_media
    return divided


def add_queries(features: MediaFeatures, sample: Sample, generator: GeneratorSettings | None) -> MediaFeatures:
    """Add the queries of each image that the assistant draws to the LLM tokens of a sample's media."""
    if generator is None or not sample.target_images:
        return features
    return {**features, GENERATOR: [generator.context_tokens] * len(sample.target_images)}


def find_marks(sample: Sample) -> dict[str, str]:
    """Return the marks that stand for a medium in the user turns of a sample, each with the medium's modality.

    Without clips an `<audio>` is ordinary text, as it was in data written before models had audio; so with videos.
    Images always have marks.
    """
    media = sample.media
    marks = {}
    for modality in MODALITIES.values():
        for kind, mark in modality.marks.items():
            if kind == "image" or media[kind]:
                marks[mark] = modality.name
    return marks
