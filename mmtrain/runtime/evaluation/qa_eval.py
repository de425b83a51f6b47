"""Answer questions about held-out samples, distributed over the replicas of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar, cast

import numpy as np

from mmtrain.balance import IntArray, ItemLengths, SampleLengths, assign
from mmtrain.data import (
    BatchBuilder,
    DataIndex,
    EncodedSample,
    Quarantined,
    Sample,
    SampleTokenizer,
    Turn,
    build_index,
    load_recipe_tokenizer,
)
from mmtrain.data.formats.sample import AUDIO_MARK, IMAGE_MARK, MEDIA_ROLES, VIDEO_MARK, written_text
from mmtrain.data.media.images import CellArray
from mmtrain.data.media.media_bytes import Media
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, BadConversationError, last_answer_ids, total_features
from mmtrain.errors import DataError, UserError
from mmtrain.program import LLM
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR, VISION
from mmtrain.runtime.evaluation.generate import GreedyGenerator, TokenListener
from mmtrain.runtime.execution.activity import ANSWERING
from mmtrain.runtime.execution.rank_context import RankContext
from mmtrain.runtime.world import World

MAX_GENERATION_MICROBATCH_TOKENS = 8192  # roughly, answers included
ANSWER_MARGIN_TOKENS = 8  # by which an answer may exceed the longest right one
NO_TEMPLATE = "all"  # the template of questions whose data names none
T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # compared by identity: two samples may ask the same
class HeldOutQuestion:
    """A held-out sample without its last answer."""

    number: int  # of the sample, in the index
    sample: Sample

    @property
    def template(self) -> str:
        """The kind of question."""
        return self.sample.template or NO_TEMPLATE

    @property
    def asked(self) -> tuple[Turn, ...]:
        """The turns of users and tools in the prompt; the conversation may go on after its last answer."""
        return tuple(turn for turn in self.sample.turns[: self.sample.last_answer] if turn.role in MEDIA_ROLES)

    @property
    def images(self) -> tuple[Media, ...]:
        """The images and videos of the prompt; turns after the answer may have more."""
        marks = (IMAGE_MARK, VIDEO_MARK) if self.sample.videos else (IMAGE_MARK,)
        return tuple(media for _, media in self.sample.media_of(VISION.media)[: self._count(*marks)])

    @property
    def pictures(self) -> tuple[Media, ...]:
        """The images of the prompt without its videos."""
        return self.sample.images[: self._count(IMAGE_MARK)]

    @property
    def clips(self) -> tuple[Media, ...]:
        """The clips of the prompt."""
        return self.sample.clips[: self._count(AUDIO_MARK)]

    @property
    def media(self) -> tuple[Media, ...]:
        """All media of the prompt."""
        return self.images + self.clips

    @property
    def expected(self) -> str:
        """The right answer, as its data spells it."""
        return written_text(self.sample.answer).strip()

    def _count(self, *marks: str) -> int:
        return sum(turn.text.count(mark) for turn in self.asked for mark in marks)


def asked_text(question: HeldOutQuestion) -> str:
    """Return the last thing that was asked, as its data spells it; empty if nothing was."""
    return written_text(question.asked[-1].text).strip() if question.asked else ""


@dataclass(frozen=True)
class GivenAnswer:
    """A held-out question with the answer that the model gave."""

    question: HeldOutQuestion
    expected: str
    answered: str


@dataclass(frozen=True)
class GivenAnswers:
    """What the model in training answered, without questions whose media are broken."""

    answers: tuple[GivenAnswer, ...]
    exact: float  # share of all questions whose answer is exactly right


def select_questions(index: DataIndex, limit: int | None) -> list[HeldOutQuestion]:
    """Return a question for every sample, or for `limit` samples evenly spaced in the index.

    Samples whose last answer is an image, or has one, ask no question that a text answers. Those that are cut have no
    last answer.
    """
    asking = (number for number, sample in enumerate(index.samples) if not draws_last(sample))
    numbers = [number for number in asking if index.samples[number].cut is None]
    return [
        HeldOutQuestion(n, index.samples[n]) for n in evenly_spaced(numbers, len(numbers) if limit is None else limit)
    ]


def draws_last(sample: Sample) -> bool:
    """Return whether the last answer of a sample has an image to draw."""
    return bool(sample.target_images) and IMAGE_MARK in sample.answer


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return at most `count` of the items, evenly spaced.

    >>> evenly_spaced("abcdef", 3)
    ['a', 'c', 'e']
    """
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


@dataclass(frozen=True)
class AnsweredRound:
    """What the model generated in one round of batches."""

    num_questions: int  # that were asked, those with broken media included
    tokens: dict[HeldOutQuestion, list[int]]  # of the answers


RoundListener = Callable[[AnsweredRound], None]


def ignore_round(answered: AnsweredRound) -> None:
    """Do nothing with the answers of a round."""


class QuestionAnswerer:
    """Lets a model answer whose stages lie on all ranks; every rank asks the same and gets all answers."""

    def __init__(
        self,
        generator: GreedyGenerator,
        recipe: Recipe,
        tokenizer: SampleTokenizer,
        index: DataIndex,
        world: World,
        max_new_tokens: int | None = None,
    ) -> None:
        """Answer questions about samples of `index`, which must be equal on all ranks.

        An answer has at most `max_new_tokens`; None: as many as the tokenizer's folder permits (`generation_config`),
        or `ANSWER_MARGIN_TOKENS` more than the longest right one if that says nothing.
        """
        self._max_new_tokens = max_new_tokens
        self._generator, self._recipe, self._tokenizer = generator, recipe, tokenizer
        self._index, self._world = index, world

    def answer(
        self, questions: Sequence[HeldOutQuestion], *, blank: bool, listener: RoundListener = ignore_round
    ) -> tuple[dict[HeldOutQuestion, str], list[Quarantined]]:
        """Return what the model answers behind its thoughts, as text; with `blank`, images and clips are zeros.

        Questions whose media cannot be decoded are left out of the answers and returned with the reason. `listener`
        hears of each round on every rank.
        """
        tokens, bad = self.generate(questions, blank=blank, listener=listener)
        return {question: self.text(ids) for question, ids in tokens.items()}, bad

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens, without thoughts in front of the answer."""
        return self._tokenizer.final_answer(ids)

    def right_answers(self, questions: Sequence[HeldOutQuestion]) -> dict[HeldOutQuestion, str]:
        """Return the right answers as `answer` would return them of a model that generates what it was trained on.

        What a template writes into an answer, such as an empty thought, is part of neither.
        """
        right = {}
        for question in questions:
            features = self._index.media_features(question.number, self._tokenizer.writes_rows_apart)
            ids = last_answer_ids(self._tokenizer, question.sample, features).tolist()
            end = next((place for place, token in enumerate(ids) if token in self._tokenizer.end_ids), len(ids))
            right[question] = self._tokenizer.final_answer(ids[:end])
        return right

    def generate(
        self,
        questions: Sequence[HeldOutQuestion],
        *,
        blank: bool,
        listener: RoundListener = ignore_round,
        token_listener: TokenListener | None = None,
    ) -> tuple[dict[HeldOutQuestion, list[int]], list[Quarantined]]:
        """Return the model's answers as token ids; otherwise as `answer`. `token_listener`: see `GreedyGenerator`."""
        lengths = prompt_lengths(self._index, self._tokenizer, questions)
        prompts = {}
        if self._tokenizer.greedy.changes_logits:
            prompts = {q.number: _prompt_ids(self._index, self._tokenizer, q.number) for q in questions}
        numbers = [question.number for question in questions]
        limits = self._answer_limits(numbers, lengths)
        sizes = [int(lengths.tokens[number]) + limits[number] for number in numbers]
        builder = _PromptBuilder(self._index, self._recipe, self._generator, self._tokenizer, blank)
        asked = {question.number: question for question in questions}
        answers: dict[HeldOutQuestion, list[int]] = {}
        bad: dict[tuple[str, int], Quarantined] = {}
        dp, num_microbatches = self._generator.dp, self._generator.num_microbatches
        batches_per_round = dp[LLM] * num_microbatches[LLM]
        for batches in batch_by_length(sizes, batches_per_round, MAX_GENERATION_MICROBATCH_TOKENS):
            if not any(batches):  # a sequence beyond the limit takes the place of several rounds
                continue
            samples = [np.array([numbers[i] for i in batch], dtype=np.int64) for batch in batches]
            data = builder.build(assign(0, 0, samples, lengths, dp, num_microbatches))
            longest = max(limits[int(number)] for batch in samples for number in batch)
            answers_of_rank = self._generator.generate(data, longest, prompts, token_listener)
            tokens, bad_of_round = self._gather(answers_of_rank, data.quarantined)
            bad |= bad_of_round
            answers_of_round = {
                asked[number]: ids[: limits[number]]
                for number, ids in sorted(tokens.items())
                if (asked[number].sample.source, asked[number].sample.index) not in bad_of_round
            }
            answers |= answers_of_round
            listener(AnsweredRound(sum(map(len, samples)), answers_of_round))
        in_order = {question: answers[question] for question in questions if question in answers}
        return in_order, [bad[key] for key in sorted(bad)]

    def _gather(
        self, tokens: dict[int, list[int]], quarantined: Sequence[Quarantined]
    ) -> tuple[dict[int, list[int]], dict[tuple[str, int], Quarantined]]:
        """Return the answers of a round and its unusable samples, of all ranks."""
        self._generator.activity.start(ANSWERING)
        bad = {(entry.source, entry.index): entry for entry in quarantined}
        for rank_result in self._world.all_gather((tokens, bad)):
            rank_tokens, rank_bad = cast(tuple[dict[int, list[int]], dict[tuple[str, int], Quarantined]], rank_result)
            tokens = tokens | rank_tokens
            bad = bad | rank_bad
        return tokens, bad

    def _answer_limits(self, numbers: Sequence[int], lengths: SampleLengths) -> dict[int, int]:
        """Return the most tokens of the answer to each question; `lengths` are those of their prompts."""
        longest_answer = max(self._index.lengths.tokens[numbers] - lengths.tokens[numbers], default=0)
        usual = ANSWER_MARGIN_TOKENS + int(longest_answer)
        limits = {}
        for number in numbers:
            of_folder = self._tokenizer.greedy.answer_limit(int(lengths.tokens[number]))
            limits[number] = self._max_new_tokens or of_folder or usual
        return limits


def build_held_out_evaluation(rank_context: RankContext) -> Callable[[], GivenAnswers]:
    """Return a function that lets the model in training answer held-out questions.

    All ranks must call it together. Questions with broken media count as wrong.
    """
    recipe = rank_context.recipe
    index = build_index(recipe, "validation")
    tokenizer = load_recipe_tokenizer(recipe)
    questions = select_questions(index, recipe.train.evaluate_questions)
    if not questions:
        raise UserError(
            f"train.evaluate_every: found {recipe.train.evaluate_every}, allowed with this "
            f"{recipe.data.held_out_setting}: 0, because "
            "the last answer of every held-out sample has an image to draw, or is cut; train.validate_every computes "
            "its loss"
        )
    generator = GreedyGenerator.of(rank_context, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, rank_context.world)
    right = answerer.right_answers(questions)

    def evaluate() -> GivenAnswers:
        answers, _ = answerer.answer(questions, blank=False)
        given = tuple(GivenAnswer(question, right[question], answer) for question, answer in answers.items())
        return GivenAnswers(given, sum(one.answered == one.expected for one in given) / len(questions))

    return evaluate


class _PromptBuilder(BatchBuilder):
    """Builds batches of prompts, without answers; with `blank`, their images and clips are zeros."""

    def __init__(
        self, index: DataIndex, recipe: Recipe, generator: GreedyGenerator, tokenizer: SampleTokenizer, blank: bool
    ) -> None:
        super().__init__(index, recipe, generator.needs, generator.num_microbatches, tokenizer)
        self._blank = blank

    def _encode(self, sample_id: int) -> EncodedSample:
        ids = _prompt_ids(self._index, self._tokenizer, sample_id)
        return EncodedSample(ids, np.full_like(ids, IGNORE_INDEX))

    def _load_cells(self, unit: str, sample_id: int, position: int, rows: int, cols: int) -> CellArray | None:
        if self._blank:
            return None
        return super()._load_cells(unit, sample_id, position, rows, cols)


def batch_by_length(sizes: Sequence[int], num_batches: int, max_tokens: int) -> list[list[list[int]]]:
    """Distribute sequences to rounds of `num_batches` batches of about equal tokens, at most about `max_tokens` each.

    Sequences of one batch are of similar length, so that little of the KV cache is padding. A batch exceeds the limit
    by less than its longest sequence; with few sequences some batches are empty. Return (rounds, batches) of positions
    in `sizes`.

    >>> batch_by_length([5, 2, 9, 2], num_batches=2, max_tokens=9)
    [[[1, 3, 0], [2]]]
    """
    if not sizes:
        return []
    total = sum(sizes)
    num_rounds = -(-total // (num_batches * max_tokens))
    num_all = num_rounds * num_batches
    batches: list[list[int]] = [[] for _ in range(num_all)]
    by_size = sorted(range(len(sizes)), key=lambda i: sizes[i])
    for i, end in zip(by_size, accumulate(sizes[i] for i in by_size), strict=True):
        middle = 2 * end - sizes[i]  # of the sequence, in half tokens
        batches[middle * num_all // (2 * total)].append(i)
    return [batches[first : first + num_batches] for first in range(0, num_all, num_batches)]


def _prompt_ids(index: DataIndex, tokenizer: SampleTokenizer, number: int) -> IntArray:
    sample = index.samples[number]
    try:
        return tokenizer.prompt_ids(sample, index.media_features(number, tokenizer.writes_rows_apart))
    except BadConversationError as bad:  # its whole conversation was encoded, but not this part of it
        raise DataError(f"{sample} has no prompt for its last answer: {bad}") from None


def prompt_lengths(index: DataIndex, tokenizer: SampleTokenizer, questions: Sequence[HeldOutQuestion]) -> SampleLengths:
    """Return the lengths of prompts with only the items that they show; samples without a question have length 0."""
    ids = {question.number: _prompt_ids(index, tokenizer, question.number) for question in questions}
    tokens = np.zeros(len(index.samples), dtype=np.int64)
    tokens[list(ids)] = [len(prompt) for prompt in ids.values()]
    items = {}
    for unit, table in index.lengths.items.items():
        if unit == GENERATOR:  # it draws nothing in an answer of text
            continue
        modality = index.modalities[unit]
        in_prompt = np.zeros(len(table.rows), dtype=bool)
        for number, prompt in ids.items():
            of_sample = slice(table.first[number], table.first[number + 1])
            num_features = np.sum(np.isin(prompt, tokenizer.item_ids[modality]))
            of_media = [total_features(of_medium) for of_medium in index.media_features(number)[modality]]
            num_media = int(np.sum(np.cumsum(of_media) <= num_features))
            in_prompt[of_sample] = np.cumsum(index.item_parts[unit][of_sample] == 0) <= num_media
        first = np.concatenate([[0], np.cumsum(in_prompt)])[np.asarray(table.first)]
        columns = (table.rows, table.cols, table.tokens, table.features)
        items[unit] = ItemLengths(first, *(column[in_prompt] for column in columns))
    return SampleLengths(tokens, np.zeros_like(tokens), items)
