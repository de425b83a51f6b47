"""Questions about held-out samples, dealt to the replicas of a model and answered by it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np

from mmtrain.balance import IntArray, ItemLengths, SampleLengths, assign
from mmtrain.data import BatchBuilder, ChatTokenizer, DataIndex, EncodedSample, Quarantined, Sample, Turn, build_index
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK
from mmtrain.data.media.images import Float32Array
from mmtrain.data.media.media_bytes import Media
from mmtrain.data.text.chat_tokenizer import IGNORE_INDEX
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.modalities import VISION
from mmtrain.runtime.evaluation.generate import GreedyGenerator
from mmtrain.runtime.execution.activity import ANSWERING
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.world import World

MAX_GENERATION_MICROBATCH_TOKENS = 8192  # about as many in one microbatch, answers included
ANSWER_MARGIN_TOKENS = 8  # how much longer than the longest right answer one may grow
NO_TEMPLATE = "all"  # where the data names no kinds of questions
T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # told apart by identity: two samples may ask the same
class HeldOutQuestion:
    """A held-out sample, cut where its last answer begins."""

    number: int  # of the sample in the index
    sample: Sample

    @property
    def template(self) -> str:
        """The kind of question."""
        return self.sample.template or NO_TEMPLATE

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The user's turns that the prompt holds: a conversation may go on after its last answer."""
        last = max(i for i, turn in enumerate(self.sample.turns) if turn.role == "assistant")
        return tuple(turn for turn in self.sample.turns[:last] if turn.role == "user")

    @property
    def images(self) -> tuple[Media, ...]:
        """The images and videos of the prompt; a turn after the answer may have more."""
        marks = (IMAGE_MARK, VIDEO_MARK) if self.sample.videos else (IMAGE_MARK,)
        return tuple(media for _, media in self.sample.media_of(VISION.media)[: self._count(*marks)])

    @property
    def clips(self) -> tuple[Media, ...]:
        """The clips of the prompt."""
        return self.sample.clips[: self._count(AUDIO_MARK)]

    @property
    def media(self) -> tuple[Media, ...]:
        """What the model would be blind or deaf without."""
        return self.images + self.clips

    @property
    def expected(self) -> str:
        """The right answer."""
        return self.sample.answer.strip()

    def _count(self, *marks: str) -> int:
        return sum(turn.text.count(mark) for turn in self.asked for mark in marks)


def select_questions(index: DataIndex, limit: int | None) -> list[HeldOutQuestion]:
    """Make questions of the samples; with a limit, of samples spread evenly over the index."""
    numbers = range(len(index.samples))
    return [
        HeldOutQuestion(n, index.samples[n]) for n in evenly_spaced(numbers, len(numbers) if limit is None else limit)
    ]


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, at even distances.

    >>> spread("abcdef", 3)
    ['a', 'c', 'e']
    """
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


class QuestionAnswerer:
    """Puts questions to a model whose stages lie on all ranks of a world; every rank asks and hears the same."""

    def __init__(
        self,
        generator: GreedyGenerator,
        recipe: Recipe,
        tokenizer: ChatTokenizer,
        index: DataIndex,
        world: World,
        max_new_tokens: int | None = None,
    ) -> None:
        """Ask about samples of `index`, which is the same on all ranks.

        An answer has at most `max_new_tokens`, by default a few more than the longest right one.
        """
        self._max_new_tokens = max_new_tokens
        self._generator, self._recipe, self._tokenizer = generator, recipe, tokenizer
        self._index, self._world = index, world

    def answer(
        self, questions: Sequence[HeldOutQuestion], *, blank: bool
    ) -> tuple[dict[HeldOutQuestion, str], list[Quarantined]]:
        """Let the model answer, with its images and clips or blank ones.

        Questions whose media cannot be decoded are left out of the answers, and returned with the reason.
        """
        tokens, bad = self.generate(questions, blank=blank)
        return {question: self._tokenizer.decode(ids).strip() for question, ids in tokens.items()}, bad

    def generate(
        self, questions: Sequence[HeldOutQuestion], *, blank: bool
    ) -> tuple[dict[HeldOutQuestion, list[int]], list[Quarantined]]:
        """The same, in tokens."""
        lengths = prompt_lengths(self._index, self._tokenizer, questions)
        numbers = [q.number for q in questions]
        longest_answer = max((self._index.lengths.tokens - lengths.tokens)[numbers], default=0)
        max_new_tokens = self._max_new_tokens or ANSWER_MARGIN_TOKENS + int(longest_answer)
        sizes = [int(lengths.tokens[number]) + max_new_tokens for number in numbers]
        batch_builder = _Prompts(self._index, self._recipe, self._generator, self._tokenizer, blank)
        written: dict[int, list[int]] = {}
        bad: dict[tuple[str, int], Quarantined] = {}
        dp, num_microbatches = self._generator.dp, self._generator.num_microbatches
        for groups in batch_by_length(sizes, dp[LLM] * num_microbatches[LLM], MAX_GENERATION_MICROBATCH_TOKENS):
            samples = [np.array([numbers[i] for i in group], dtype=np.int64) for group in groups]
            data = batch_builder.build(assign(0, 0, samples, lengths, dp, num_microbatches))
            bad |= {(q.source, q.index): q for q in data.quarantined}
            written |= self._generator.generate(data, max_new_tokens)
        self._generator.activity.start(ANSWERING)
        for theirs in self._world.all_gather((written, bad)):
            assert isinstance(theirs, tuple)
            written, bad = written | theirs[0], bad | theirs[1]
        answers = {
            question: written[question.number]
            for question in questions
            if (question.sample.source, question.sample.index) not in bad
        }
        return answers, [bad[key] for key in sorted(bad)]


def build_held_out_evaluation(job: RankContext) -> Callable[[], float]:
    """Return a function that asks the model in training and returns the share of answers that are exactly right.

    All ranks must call it together. Questions with broken media count as wrong.
    """
    recipe = job.recipe
    if not recipe.train.evaluate_every:
        return lambda: float("nan")
    index, tokenizer = build_index(recipe, "validation"), ChatTokenizer.load(recipe.data.tokenizer_file)
    questions = select_questions(index, recipe.train.evaluate_questions)
    asker = QuestionAnswerer(GreedyGenerator.of(job, tokenizer), recipe, tokenizer, index, job.world)

    def evaluate() -> float:
        answers, _ = asker.answer(questions, blank=False)
        return sum(answer == question.expected for question, answer in answers.items()) / len(questions)

    return evaluate


class _Prompts(BatchBuilder):
    """Prepares samples up to where their answer begins, on request with nothing in their images and clips."""

    def __init__(
        self, index: DataIndex, recipe: Recipe, generator: GreedyGenerator, tokenizer: ChatTokenizer, blank: bool
    ) -> None:
        super().__init__(index, recipe, generator.needs, generator.num_microbatches, tokenizer)
        self._blank = blank

    def _encode(self, sample_id: int) -> EncodedSample:
        ids = _prompt_ids(self._index, self._tokenizer, sample_id)
        return EncodedSample(ids, np.full_like(ids, IGNORE_INDEX))

    def _load_cells(self, unit: str, sample_id: int, position: int, rows: int, cols: int) -> Float32Array:
        if self._blank:
            return np.zeros((rows * cols, self._encoders[unit].cell_features), dtype=np.float32)
        return super()._load_cells(unit, sample_id, position, rows, cols)


def batch_by_length(sizes: Sequence[int], ways: int, max_tokens: int) -> list[list[list[int]]]:
    """Deal sequences to rounds of `ways` batches, about equal in tokens, each of at most about `max_tokens`.

    Sequences of one batch are of similar length, so that little of what is remembered of them is padding. A batch
    passes the limit by less than its longest sequence; where there is little to deal, some are empty.

    >>> deal([5, 2, 9, 2], ways=2, max_tokens=9)
    [[[1, 3, 0], [2]]]
    """
    if not sizes:
        return []
    total = sum(sizes)
    num_rounds = -(-total // (ways * max_tokens))
    num_batches = num_rounds * ways
    batches: list[list[int]] = [[] for _ in range(num_batches)]
    by_size = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for i, end in zip(by_size, accumulate(sizes[i] for i in by_size), strict=True):
        middle = 2 * end - sizes[i]  # in half tokens
        batches[middle * num_batches // (2 * total)].append(i)
    return [batches[first : first + ways] for first in range(0, num_batches, ways)]


def _prompt_ids(index: DataIndex, tokenizer: ChatTokenizer, number: int) -> IntArray:
    return tokenizer.prompt_ids(index.samples[number], index.media_features(number))


def prompt_lengths(index: DataIndex, tokenizer: ChatTokenizer, questions: Sequence[HeldOutQuestion]) -> SampleLengths:
    """Lengths of prompts, with no more of a sample's items than its prompt shows; of other samples nothing."""
    ids = {q.number: _prompt_ids(index, tokenizer, q.number) for q in questions}
    tokens = np.zeros(len(index.samples), dtype=np.int64)
    tokens[list(ids)] = [len(found) for found in ids.values()]
    items = {}
    for unit, whole in index.lengths.items.items():
        kept = np.zeros(len(whole.rows), dtype=bool)
        for number, found in ids.items():
            here = slice(whole.first[number], whole.first[number + 1])
            kept[here] = np.cumsum(whole.features[here]) <= np.sum(found == tokenizer.item_ids[unit])
        first = np.concatenate([[0], np.cumsum(kept)])[whole.first]
        columns = (whole.rows, whole.cols, whole.tokens, whole.features)
        items[unit] = ItemLengths(first, *(column[kept] for column in columns))
    return SampleLengths(tokens, np.zeros_like(tokens), items)
