"""`mmtrain evaluate`: a run's newest good checkpoint answers held-out questions, and is scored.

A question is a held-out sample without its last answer; the model's own answer counts when it is exactly that one,
but for space around it.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from mmtrain.balance.batch import IntArray
from mmtrain.checkpoint import Checkpoint, find, open_newest_good
from mmtrain.data.audio import load_mels
from mmtrain.data.index import DataIndex, build, check_bad_rate
from mmtrain.data.media import BadMediaError, Media
from mmtrain.data.pictures import Pictures
from mmtrain.data.read import read
from mmtrain.data.resize import Grid
from mmtrain.data.sample import AUDIO_MARK, IMAGE_MARK, VIDEO_MARK, Quarantined, Sample, Sight, Turn
from mmtrain.data.tokenize import ChatTokenizer
from mmtrain.errors import CheckpointError, UserError
from mmtrain.recipe import Recipe, load
from mmtrain.report.evaluation import EvaluationResult, Example, TemplateScore
from mmtrain.runtime.generate import Clip, Model, Picture, Prompt, batches, build_model, generate, load_weights
from mmtrain.runtime.rundir import CHECKPOINTS, RECIPE

MAX_BATCH_TOKENS = 8192
SPARE_TOKENS = 8  # how much longer than the longest right answer one may grow
NUM_EXAMPLES = 5
NO_TEMPLATE = "all"  # where the data names no kinds of questions
T = TypeVar("T")


@dataclass(frozen=True, eq=False)  # told apart by identity: two samples may ask the same
class Question:
    """A held-out sample, cut where its last answer begins."""

    sample: Sample
    ids: IntArray  # (T,) the prompt, tokens of images and clips included
    grids: tuple[tuple[Grid, ...], ...]  # of each image and video in the prompt: its items in patches
    answer_tokens: int  # of the right answer, with the `<|end|>` that closes it
    frames: tuple[int, ...] = ()  # of each clip in the prompt

    @property
    def template(self) -> str:
        """The kind of question."""
        return self.sample.template or NO_TEMPLATE

    @property
    def sights(self) -> tuple[tuple[Sight, Media], ...]:
        """The images and videos of the prompt; a turn after the answer may have more."""
        return self.sample.sights[: len(self.grids)]

    @property
    def clips(self) -> tuple[Media, ...]:
        """The clips of the prompt."""
        return self.sample.clips[: len(self.frames)]

    @property
    def media(self) -> tuple[Media, ...]:
        """What the model would be blind or deaf without."""
        return tuple(media for _, media in self.sights) + self.clips

    @property
    def expected(self) -> str:
        """The right answer."""
        return self.sample.answer.strip()


Answers = Mapping[Question, str]


def run(run_dir: Path, *, limit: int | None, blank_images: bool) -> EvaluationResult:
    """Score the newest good checkpoint of a run on its recipe's held-out samples, at most `limit` of them.

    With `blank_images` the model gets zeros in place of every image and clip. Damaged checkpoints and unusable
    samples are named on stderr and passed over.

    Raises UserError if `run_dir` is no run or its recipe has no held-out data, CheckpointError if no checkpoint is
    good, TooManyBadSamples above `data.max_bad_rate`.
    """
    recipe = _recipe(run_dir)
    checkpoint = _checkpoint(run_dir, recipe)
    index = build(recipe, "validation")
    tokenizer = ChatTokenizer.load(recipe.data.tokenizer)
    model = build_model(recipe, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    load_weights(model, checkpoint)

    asked = questions_of(index, tokenizer, limit)
    answers, bad = answer(model, recipe, tokenizer, asked, blank=blank_images)
    _report_unusable((*index.quarantined, *bad), len(index.samples) + len(index.quarantined), recipe)
    blanked = answers
    if not blank_images:  # without media there is nothing to blank, and nothing to ask again
        seeing = [question for question in answers if question.media]
        blanked = answers | answer(model, recipe, tokenizer, seeing, blank=True)[0]
    templates = score(answers, blanked, _training_answers(recipe))
    return EvaluationResult(checkpoint.step, templates, _examples(answers))


def questions_of(index: DataIndex, tokenizer: ChatTokenizer, limit: int | None) -> list[Question]:
    """Make questions of the samples; with a limit, of samples spread evenly over the index."""
    return [
        _question(index, tokenizer, number)
        for number in spread(range(len(index.samples)), len(index.samples) if limit is None else limit)
    ]


def answer(
    model: Model, recipe: Recipe, tokenizer: ChatTokenizer, questions: Sequence[Question], *, blank: bool
) -> tuple[dict[Question, str], list[Quarantined]]:
    """Let the model answer, with its images and clips or blank ones.

    Questions whose media cannot be decoded are left out of the answers, and returned with the reason.
    """
    max_new_tokens = SPARE_TOKENS + max((question.answer_tokens for question in questions), default=0)
    found: dict[Question, str] = {}
    bad: list[Quarantined] = []
    for batch in batches([len(question.ids) + max_new_tokens for question in questions], MAX_BATCH_TOKENS):
        prompts: dict[Question, Prompt] = {}
        for question in (questions[number] for number in batch):
            try:
                pictures, clips = load_pictures(question, recipe, blank), load_clips(question, recipe, blank)
                prompts[question] = Prompt(question.ids, pictures, clips)
            except BadMediaError as error:
                bad.append(Quarantined.of(question.sample, error.kind, str(error)))
        generated = generate(model, list(prompts.values()), tokenizer, max_new_tokens)
        for question, ids in zip(prompts, generated, strict=True):
            found[question] = tokenizer.decode(ids).strip()
    return {question: found[question] for question in questions if question in found}, bad


def score(answers: Answers, blanked: Answers, training: Sequence[tuple[str, str]]) -> tuple[TemplateScore, ...]:
    """Count, for each template, the right answers of the model, of the model with blanked images, and of the baseline.

    `training` holds (template, answer) of the training samples. The baseline gives a template's most frequent
    answer there, of equally frequent ones the first in the alphabet; to a template that training does not have,
    the most frequent answer of all.
    """
    frequent = _most_frequent(training)
    of_template: dict[str, list[Question]] = defaultdict(list)
    for question in answers:
        of_template[question.template].append(question)
    scores = []
    for template, questions in sorted(of_template.items()):
        usual = frequent.get(template, frequent.get(None))
        scores.append(
            TemplateScore(
                template,
                questions=len(questions),
                exact=sum(answers[q] == q.expected for q in questions),
                baseline=sum(usual == q.expected for q in questions),
                blanked=sum(blanked[q] == q.expected for q in questions) if any(q.media for q in questions) else None,
            )
        )
    return tuple(scores)


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` of the items, at even distances.

    >>> spread("abcdef", 3)
    ['a', 'c', 'e']
    """
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _recipe(run_dir: Path) -> Recipe:
    path = run_dir / RECIPE
    if not path.is_file():
        found = f"it has no {RECIPE}" if run_dir.is_dir() else "there is no such folder"
        raise UserError(
            f"{run_dir}: not the folder of a run: {found}. Name the folder that `mmtrain train` wrote to "
            "(`run_dir` of its recipe, by default runs/<name>)"
        )
    recipe = load(path).recipe
    if not recipe.data.validation:
        raise UserError(
            f"{path}: data.validation: no held-out data to ask about; add a source of samples that training "
            "does not see, such as `validation: [{path: heldout.json}]` under `data`"
        )
    return recipe


def _checkpoint(run_dir: Path, recipe: Recipe) -> Checkpoint:
    root = run_dir / CHECKPOINTS
    if not find(root):
        every = recipe.train.checkpoint.every
        first = f"after step {min(every, recipe.train.steps)}" if every else "at the end of training"
        raise CheckpointError(f"{root}: no checkpoint yet; training writes the first one {first}")
    return open_newest_good(root, _say)


def _question(index: DataIndex, tokenizer: ChatTokenizer, number: int) -> Question:
    sample = index.samples[number]
    ids = tokenizer.prompt_ids(sample, index.features(number), index.features(number, "audio"))
    asked = [turn.text for turn in _before_answer(sample) if turn.role == "user"]
    marks = (IMAGE_MARK, VIDEO_MARK) if sample.videos else (IMAGE_MARK,)
    grids = index.grids(number)[: sum(text.count(mark) for text in asked for mark in marks)]
    clips = index.grids(number, "audio")[: sum(text.count(AUDIO_MARK) for text in asked)]
    frames = tuple(rows for ((rows, _),) in clips)
    return Question(sample, ids, grids, int(index.lengths.tokens[number]) - len(ids), frames)


def _before_answer(sample: Sample) -> tuple[Turn, ...]:
    """Return the turns that the prompt holds: a conversation may go on after its last answer."""
    last = max(i for i, turn in enumerate(sample.turns) if turn.role == "assistant")
    return sample.turns[:last]


def load_pictures(question: Question, recipe: Recipe, blank: bool) -> tuple[Picture, ...]:
    """Load the images and frames of a question. Raises BadMediaError."""
    vision = recipe.model.vision
    if not question.sights or vision is None:
        return ()
    pictures = Pictures(recipe.data.image, vision.patch)
    return tuple(
        Picture(*grid, pictures.blank(grid) if blank else pictures.patches(kind, media, part, len(items), grid))
        for (kind, media), items in zip(question.sights, question.grids, strict=True)
        for part, grid in enumerate(items)
    )


def load_clips(question: Question, recipe: Recipe, blank: bool) -> tuple[Clip, ...]:
    """Load the clips of a question. Raises BadAudioError."""
    audio = recipe.model.audio
    if not question.clips or audio is None:
        return ()
    return tuple(
        Clip(np.zeros((frames, audio.mel_bins), np.float32) if blank else load_mels(path, frames, audio.mel_bins))
        for path, frames in zip(question.clips, question.frames, strict=True)
    )


def _training_answers(recipe: Recipe) -> list[tuple[str, str]]:
    """Read (template, answer) of every training sample. Straight from the files: no image needs to be looked at."""
    samples = (entry for source in recipe.data.sources for entry in read(source, recipe.data.limits))
    answered = (s for s in samples if isinstance(s, Sample) and s.answer.strip())
    return [(s.template or NO_TEMPLATE, s.answer.strip()) for s in answered]


def _most_frequent(training: Iterable[tuple[str, str]]) -> dict[str | None, str]:
    """Most frequent answer of each template, and of all together under None."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    for template, text in training:
        counts[template][text] += 1
        counts[None][text] += 1
    return {template: min(found, key=lambda text: (-found[text], text)) for template, found in counts.items()}


def _examples(answers: Answers) -> tuple[Example, ...]:
    """A few answers as they came, right or wrong, of as many templates as possible."""
    of_template: dict[str, list[Question]] = defaultdict(list)
    for question in answers:
        of_template[question.template].append(question)
    rounds = sorted((nth, template) for template, found in of_template.items() for nth in range(len(found)))
    chosen = spread(rounds[: max(len(of_template), NUM_EXAMPLES)], NUM_EXAMPLES)
    return tuple(_example(of_template[template][nth], answers) for nth, template in chosen)


def _example(question: Question, answers: Answers) -> Example:
    *_, asked = ("", *(turn.text for turn in _before_answer(question.sample) if turn.role == "user"))
    return Example(asked, question.expected, answers[question], tuple(str(path) for path in question.media))


def _report_unusable(bad: Sequence[Quarantined], total: int, recipe: Recipe) -> None:
    """Name the first of the samples that were not asked; stop above the rate that the recipe allows."""
    check_bad_rate(bad, total, recipe.data.max_bad_rate)
    if bad:
        _say(f"{len(bad)} of {total} held-out samples are unusable and not asked; the first: {bad[0]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
