"""`mmtrain evaluate`: a run's newest good checkpoint answers held-out questions, and is scored.

A question is a held-out sample without its last answer; the model's own answer counts when it is exactly that one,
but for space around it. Any number of ranks may answer: each builds its own stages and loads nothing else.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mmtrain.balance import SampleLengths
from mmtrain.checkpoint import find, open_newest_good
from mmtrain.data import ChatTokenizer, DataIndex, Quarantined, Sample, build_index
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.index.data_index import check_bad_rate
from mmtrain.errors import CheckpointError, LaunchError, UserError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.model_shape import build_model_shape
from mmtrain.plan.artifact.plan import Plan, StagePlan, UnitPlan
from mmtrain.plan.artifact.plan_files import load_plan
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from mmtrain.recipe.schema import ParallelSettings
from mmtrain.report.evaluation_result import MEDIA_KINDS, AnsweredQuestion, EvaluationResult, TemplateScore
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.qa_eval import (
    NO_TEMPLATE,
    HeldOutQuestion,
    QuestionAnswerer,
    evenly_spaced,
    select_questions,
)
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.resilience.config_consensus import require_consensus
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.world import Address, World, find_address, join, leave

NUM_EXAMPLES = 5
Answers = Mapping[HeldOutQuestion, str]


@dataclass(frozen=True)
class EvaluateRequest:
    """What the user asked for."""

    run_dir: Path
    planner: Callable[[Recipe, SampleLengths, int], Plan]  # for a number of ranks that training did not have
    show: Callable[[EvaluationResult], None]  # called once, on the first rank
    limit: int | None = None  # of questions
    blank_images: bool = False
    ranks: int = 1  # processes to start where no launcher has started any


def run(request: EvaluateRequest) -> None:
    """Score the newest good checkpoint of a run on its recipe's held-out samples, at most `limit` of them.

    In the processes that a launcher has started, or else in our own. With `blank_images` the model gets zeros in place
    of every image and clip. Damaged checkpoints and unusable samples are named on stderr and passed over.

    Raises UserError if `run_dir` is no run or its recipe has no held-out data, CheckpointError if no checkpoint is
    good, TooManyBadSamples above `data.max_bad_rate`, PlanError where the ranks cannot hold the model.
    """
    recipe = _recipe(request.run_dir)
    _require_checkpoint(request.run_dir / CHECKPOINTS_FOLDER, recipe)
    address = find_address()
    if address is not None:
        if request.ranks not in (1, address.world_size):
            raise LaunchError(
                f"--ranks: {request.ranks} found, but {address.launcher} started {address.world_size} processes; "
                "leave it out here"
            )
        _evaluate_rank(request, recipe, address)
    elif request.ranks > 1:
        launch_local(request.ranks, partial(_evaluate_rank, request, recipe))
    else:
        ParallelGroups.single()  # a world of this process alone
        _evaluate(request, recipe, World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu")))


def _evaluate_rank(request: EvaluateRequest, recipe: Recipe, address: Address) -> None:
    """Be one rank of the evaluation."""
    if torch.get_num_threads() > 1 and not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core, as in training
    _evaluate(request, recipe, join(address))
    leave()


def _evaluate(request: EvaluateRequest, recipe: Recipe, world: World) -> None:
    """Load, ask, score."""
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, _say, checkpoint_ranks(world))
    index, tokenizer = build_index(recipe, "validation", _say), ChatTokenizer.load(recipe.data.tokenizer_file)
    require_consensus(world, {"held-out data": {"samples": len(index.samples), "fingerprint": index.fingerprint}})
    if index.cache_folder is not None and world.is_first:
        _say(index.remarks()[0])  # what was set aside is told with what only asking finds bad
    layout = world.on_first(lambda: _layout(request, recipe, index, world.size))
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    asker = QuestionAnswerer(generator, recipe, tokenizer, index, world)

    answers, bad = asker.answer(select_questions(index, request.limit), blank=request.blank_images)
    world.on_first(lambda: _report_unusable((*index.quarantined, *bad), index, recipe))
    blanked = answers
    if not request.blank_images:  # without media there is nothing to blank, and nothing to ask again
        seeing = [question for question in answers if question.media]
        blanked = answers | asker.answer(seeing, blank=True)[0]
    if world.is_first:
        templates = score(answers, blanked, _training_answers(recipe))
        request.show(EvaluationResult(checkpoint.step, templates, _examples(answers)))


def _layout(request: EvaluateRequest, recipe: Recipe, index: DataIndex, num_ranks: int) -> dict[str, UnitPlan]:
    """Choose where the stages lie, and say so.

    Whole on one rank, as in training on as many ranks as then, and else as the planner says, whatever the recipe
    wanted for training.
    """
    if num_ranks == 1:
        _say("evaluating on 1 rank, which holds the whole model")
        return {unit.name: _whole(len(unit.layers)) for unit in build_model_shape(recipe).units}
    saved = request.run_dir / PLAN_FILE
    plan = load_plan(saved) if saved.exists() else None
    whose = "the plan of its training"
    if plan is None or (plan.world_size, plan.recipe_sha256) != (num_ranks, recipe_fingerprint(recipe)):
        free = recipe.model_copy(update={"parallel": ParallelSettings()})
        plan, whose = request.planner(free, index.lengths, num_ranks), "a plan made for them"
    meshes = ", ".join(f"{name} tp{u.tp} pp{u.pp} dp{u.dp}" for name, u in plan.units.items())
    _say(f"evaluating on {num_ranks} ranks by {whose}: {plan.placement}, {meshes}")
    return plan.units


def _whole(num_layers: int) -> UnitPlan:
    return UnitPlan(tp=1, pp=1, dp=1, ranks=(0,), stages=(StagePlan(stage=0, layers=(0, num_layers)),))


def score(answers: Answers, blanked: Answers, training: Sequence[tuple[str, str]]) -> tuple[TemplateScore, ...]:
    """Count, for each template, the right answers of the model, of the model with blanked media, and of the baseline.

    `training` holds (template, answer) of the training samples. The baseline gives a template's most frequent
    answer there, of equally frequent ones the first in the alphabet; to a template that training does not have,
    the most frequent answer of all.
    """
    frequent = _most_frequent(training)
    of_template: dict[str, list[HeldOutQuestion]] = defaultdict(list)
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
                modalities=tuple(name for name in MEDIA_KINDS if any(getattr(q, name) for q in questions)),
            )
        )
    return tuple(scores)


def _recipe(run_dir: Path) -> Recipe:
    path = run_dir / RECIPE_FILE
    if not path.is_file():
        found = f"it has no {RECIPE_FILE}" if run_dir.is_dir() else "there is no such folder"
        raise UserError(
            f"{run_dir}: not the folder of a run: {found}. Name the folder that `mmtrain train` wrote to "
            "(`run_dir` of its recipe, by default runs/<name>)"
        )
    recipe = load_recipe(path).recipe
    if not recipe.data.validation:
        raise UserError(
            f"{path}: data.validation: no held-out data to ask about; add a source of samples that training "
            "does not see, such as `validation: [{path: heldout.json}]` under `data`"
        )
    return recipe


def _require_checkpoint(root: Path, recipe: Recipe) -> None:
    if not find(root):
        every = recipe.train.checkpoint.every
        first = f"after step {min(every, recipe.train.steps)}" if every else "at the end of training"
        raise CheckpointError(f"{root}: no checkpoint yet; training writes the first one {first}")


def _training_answers(recipe: Recipe) -> list[tuple[str, str]]:
    """Read (template, answer) of every training sample. Straight from the files: no image needs to be looked at."""
    samples = (entry for source in recipe.data.sources for entry in read_samples(source, recipe.data.limits))
    answered = (s for s in samples if isinstance(s, Sample) and s.answer.strip())
    return [(s.template or NO_TEMPLATE, s.answer.strip()) for s in answered]


def _most_frequent(training: Iterable[tuple[str, str]]) -> dict[str | None, str]:
    """Most frequent answer of each template, and of all together under None."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    for template, text in training:
        counts[template][text] += 1
        counts[None][text] += 1
    return {template: min(found, key=lambda text: (-found[text], text)) for template, found in counts.items()}


def _examples(answers: Answers) -> tuple[AnsweredQuestion, ...]:
    """A few answers as they came, right or wrong, of as many templates as possible."""
    of_template: dict[str, list[HeldOutQuestion]] = defaultdict(list)
    for question in answers:
        of_template[question.template].append(question)
    rounds = sorted((nth, template) for template, found in of_template.items() for nth in range(len(found)))
    chosen = evenly_spaced(rounds[: max(len(of_template), NUM_EXAMPLES)], NUM_EXAMPLES)
    return tuple(_example(of_template[template][nth], answers) for nth, template in chosen)


def _example(question: HeldOutQuestion, answers: Answers) -> AnsweredQuestion:
    *_, asked = ("", *(turn.text for turn in question.asked))
    images, clips = (tuple(map(str, media)) for media in (question.images, question.clips))
    return AnsweredQuestion(asked, question.expected, answers[question], images, clips)


def _report_unusable(bad: Sequence[Quarantined], index: DataIndex, recipe: Recipe) -> None:
    """Name the first of the samples that were not asked; stop above the rate that the recipe allows."""
    total = len(index.samples) + len(index.quarantined)
    check_bad_rate(bad, total, recipe.data.max_bad_rate)
    if bad:
        _say(f"{len(bad)} of {total} held-out samples are unusable and not asked; the first: {bad[0]}")


def _say(line: str) -> None:
    print(line, file=sys.stderr)
