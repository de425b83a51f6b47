"""`mmtrain evaluate`: let a run's newest good checkpoint answer held-out questions, and score the answers.

A question is a held-out sample without its last answer. The model's answer is right if it equals that one as the chat
template writes it, apart from thoughts in front of it and surrounding space. Any number of ranks may answer: each
builds and loads its own stages only.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mmtrain.balance import SampleLengths
from mmtrain.checkpoint import NEWEST, ChosenCheckpoint, find, open_chosen
from mmtrain.costs.hardware import ELEMENT_BYTES, GIB
from mmtrain.costs.layer_arithmetic import num_parameters
from mmtrain.data import DataIndex, Quarantined, Sample, SampleTokenizer, build_index, load_recipe_tokenizer
from mmtrain.data.callbacks import ProgressCallback
from mmtrain.data.formats.read_source import read_samples
from mmtrain.data.formats.sample import written_text
from mmtrain.data.formats.sample_split import SampleSplit
from mmtrain.data.index.data_index import check_bad_rate
from mmtrain.errors import CheckpointError, LaunchError, UserError
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan, StagePlan, UnitPlan
from mmtrain.planning.artifact.plan_files import load_plan, with_planned_groups
from mmtrain.recipe import Recipe, recipe_fingerprint
from mmtrain.recipe.checks.guest_checks import require_own_modules
from mmtrain.recipe.settings.parallel_settings import LlmParallel, ParallelSettings
from mmtrain.report.evaluation_result import MEDIA_KINDS, AnsweredQuestion, EvaluationResult, TemplateScore
from mmtrain.runtime.evaluation.answers_file import AnswerRecorder
from mmtrain.runtime.evaluation.drawer import Drawer
from mmtrain.runtime.evaluation.generate import load_generator
from mmtrain.runtime.evaluation.metrics import Metric, find_metrics, score_answers
from mmtrain.runtime.evaluation.qa_eval import (
    NO_TEMPLATE,
    AnsweredRound,
    GivenAnswer,
    HeldOutQuestion,
    QuestionAnswerer,
    RoundListener,
    evenly_spaced,
    ignore_round,
    select_questions,
)
from mmtrain.runtime.evaluation.score_drawings import (
    DEFAULT_DRAWING,
    SAMPLES_FOLDER,
    DrawingRequest,
    choose_options,
    draw_held_out,
    single_stages,
)
from mmtrain.runtime.execution.checkpointing import checkpoint_ranks
from mmtrain.runtime.execution.precision import precision_on_device
from mmtrain.runtime.resilience.config_consensus import require_consensus
from mmtrain.runtime.resilience.failures import lost_peers_named
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.resilience.out_of_memory import smallest_device_memory
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RECIPE_FILE, load_run_recipe
from mmtrain.runtime.world import (
    Address,
    World,
    detect_hardware,
    find_launched_world,
    introduce_address,
    join,
    leave,
    limit_threads,
    prepare_allocator,
)

NUM_EXAMPLES = 5  # of questions, shown with their answers
ProgressBar = Callable[[str, str], AbstractContextManager[ProgressCallback]]  # of a label and the word for what is done
Answers = Mapping[HeldOutQuestion, str]
# Of a device's memory. The rest is for keys and values, activations, the decoder of latents and the allocator.
MAX_SHARE_OF_WEIGHTS = 0.6


@dataclass(frozen=True)
class EvaluateRequest:
    """An evaluation, as the command line asks for it."""

    run_dir: Path
    planner: Callable[[Recipe, SampleLengths, int], Plan]  # for a number of ranks that training did not have
    show: Callable[[EvaluationResult], None]  # called once, on the first rank
    limit: int | None = None  # of questions
    blank_images: bool = False
    ranks: int = 1  # processes to start where no launcher has started any
    drawing: DrawingRequest = DEFAULT_DRAWING
    max_new_tokens: int | None = None  # of an answer; None: see `QuestionAnswerer`
    out: Path | None = None  # for a line of JSON an answer
    metrics: tuple[str, ...] | None = None  # names; None: those of the recipe
    progress: ProgressBar | None = None  # opened on the first rank
    checkpoint: ChosenCheckpoint = NEWEST

    def counting(
        self, world: World, label: str, done_word: str = "answered"
    ) -> AbstractContextManager[ProgressCallback]:
        """Open a bar that counts answers, or what `done_word` says of them, on the first rank only."""
        if self.progress is None or not world.is_first:
            return nullcontext(_show_no_progress)
        return self.progress(label, done_word)


def run(request: EvaluateRequest) -> None:
    """Score a checkpoint of a run on its recipe's held-out samples, at most `limit` of them.

    A model with a generator also draws. Each rank then runs the whole model, and takes its share of the images.

    Evaluates in the processes that a launcher has started, or starts its own. With `blank_images` the model gets zeros
    in place of every image and clip. Damaged checkpoints and unusable samples are reported on stderr and passed over.

    With `out`, the answers are written to that file after each round of batches.

    Raises UserError if `run_dir` is no run, if its recipe has no held-out data or if it cannot draw as asked. Raises
    CheckpointError if there is no good one as asked for, TooManyBadSamples above `data.max_bad_rate`, and PlanError if
    the ranks cannot hold the model.
    """
    recipe = _load_recipe(request.run_dir)
    _find_metrics(request, recipe)  # refuses what is none, before ranks start
    choose_options(request.drawing, recipe.model.generator)  # refuses what it cannot draw, before ranks start
    _require_checkpoint(request.run_dir / CHECKPOINTS_FOLDER, recipe)
    address = find_launched_world(request.ranks)
    if address is not None:
        if address.world_size == 1:  # variables that may be left from something else
            introduce_address(address)
        if request.ranks not in (1, address.world_size):
            raise LaunchError(
                f"--ranks: {request.ranks} found, but {address.launcher} started {address.world_size} processes; "
                "leave it out here"
            )
        _evaluate_rank(request, recipe, address)
    elif request.ranks > 1:
        launch_local(request.ranks, partial(_evaluate_rank, request, recipe))
    else:
        _evaluate(request, recipe, start_own_world())


def start_own_world() -> World:
    """Start a world of this process alone, on its GPU if there is one."""
    prepare_allocator()
    ParallelGroups.single()
    return World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _evaluate_rank(request: EvaluateRequest, recipe: Recipe, address: Address) -> None:
    """Evaluate as one rank."""
    limit_threads(address)
    with lost_peers_named(address):
        _evaluate(request, recipe, join(address))
        leave()


def _evaluate(request: EvaluateRequest, recipe: Recipe, world: World) -> None:
    """Load the model, let it answer with and without media, and show the scores on the first rank."""
    root, ranks = request.run_dir / CHECKPOINTS_FOLDER, checkpoint_ranks(world)
    checkpoint = open_chosen(root, request.checkpoint, _print_note, ranks)
    index = build_index(recipe, "validation", _print_note)
    tokenizer = load_recipe_tokenizer(recipe)
    require_consensus(world, {"held-out data": {"samples": len(index.samples), "fingerprint": index.fingerprint}})
    if index.cache_folder is not None and world.is_first:
        _print_note(index.remarks()[0])  # quarantined samples are reported below, with those found while answering
    if recipe.model.generator is not None or world.size == 1:
        layout = _run_whole_model(recipe, world)
    else:
        layout = world.on_first(lambda: _choose_layout(request, recipe, index, world.size))
    if tokenizer.greedy.not_followed and world.is_first:
        names = ", ".join(tokenizer.greedy.not_followed)
        _print_note(f"generation_config.json of the tokenizer sets {names}, which greedy answers here do not follow")
    generator = load_generator(recipe, layout, world, checkpoint, tokenizer)
    answerer = QuestionAnswerer(generator, recipe, tokenizer, index, world, request.max_new_tokens)

    metrics = _find_metrics(request, recipe)
    questions = select_questions(index, request.limit)
    right = answerer.right_answers(questions)
    with ExitStack() as opened:
        record: RoundListener = ignore_round
        if request.out is not None:
            record = opened.enter_context(AnswerRecorder(request.out, answerer, right, metrics, world)).record
        show = opened.enter_context(request.counting(world, "answering"))
        answers, bad = _ask(answerer, questions, show, blank=request.blank_images, record=record)
    drawings = None
    if recipe.model.generator is not None:
        drawer = Drawer(single_stages(generator.all_units), recipe, index, tokenizer, world)
        folder = request.drawing.folder or request.run_dir / SAMPLES_FOLDER
        counting = partial(request.counting, world, done_word="drawn")
        drawings, undrawn = draw_held_out(drawer, request.drawing, folder, counting, blank=request.blank_images)
        bad += [entry for entry in undrawn if entry not in bad]
    world.on_first(lambda: _report_unusable((*index.quarantined, *bad), index, recipe))
    blanked = answers
    if not request.blank_images:  # a question without media has the same answer when blanked
        with_media = [question for question in answers if question.media]
        with request.counting(world, "answering blanked questions") as show:
            blanked = answers | _ask(answerer, with_media, show, blank=True)[0]
    if world.is_first:
        templates = score(answers, blanked, right, _training_answers(recipe, tokenizer), tokenizer.final_text)
        given = [GivenAnswer(question, right[question], answer) for question, answer in answers.items()]
        scores = score_answers(metrics, given) if given else {}
        request.show(EvaluationResult(checkpoint.step, templates, _examples(answers, right), drawings, scores))


def _find_metrics(request: EvaluateRequest, recipe: Recipe) -> list[Metric]:
    if request.metrics is None:
        return find_metrics(recipe.train.metrics)
    return find_metrics(request.metrics, "--metric")


def _ask(
    answerer: QuestionAnswerer,
    questions: Sequence[HeldOutQuestion],
    show: ProgressCallback,
    *,
    blank: bool,
    record: RoundListener = ignore_round,
) -> tuple[dict[HeldOutQuestion, str], list[Quarantined]]:
    """Let the model answer; `show` hears how many questions are done, and `record` of each round on all ranks."""
    num_done = 0

    def finish_round(answered: AnsweredRound) -> None:
        nonlocal num_done
        record(answered)
        num_done += answered.num_questions
        show(num_done, len(questions))

    return answerer.answer(questions, blank=blank, listener=finish_round)


def _show_no_progress(done: int, total: int) -> None:
    """Take the place of a bar."""


def _run_whole_model(recipe: Recipe, world: World) -> dict[str, UnitPlan]:
    """Choose how the ranks hold a model that each of them runs alone, and report it. All ranks call this together.

    Ranks that draw do so: an image takes many passes through the whole model, which then wait for no other rank.
    """
    if world.size == 1:
        _print_note("evaluating on 1 rank, which holds the whole model")
        return whole_model(recipe, 1)
    too_large = too_large_for_one_rank(recipe, world)
    if world.is_first:
        holding = "each of which holds the whole model"
        if too_large is not None:
            holding = f"which hold shards of the model ({too_large})"
        _print_note(f"evaluating on {world.size} ranks, {holding}; each answers and draws its share")
    return whole_model(recipe, world.size, sharded=too_large is not None)


def _choose_layout(request: EvaluateRequest, recipe: Recipe, index: DataIndex, num_ranks: int) -> dict[str, UnitPlan]:
    """Choose the meshes and stages of every unit for several ranks, and report them.

    As many ranks as in training use its plan. Any other number gets a plan of its own, without the constraints that the
    recipe sets for training.
    """
    saved = request.run_dir / PLAN_FILE
    plan = load_plan(saved) if saved.exists() else None
    origin = "the plan of its training"
    if plan is None or (plan.world_size, plan.recipe_sha256) != (num_ranks, recipe_fingerprint(recipe)):
        trained = recipe if plan is None else with_planned_groups(recipe, plan)
        unconstrained = trained.model_copy(update={"parallel": ParallelSettings(llm=LlmParallel(cp=1))})
        plan = request.planner(unconstrained, index.lengths, num_ranks)
        origin = "a plan made for them"
    meshes = ", ".join(f"{name} {u.mesh_text}" for name, u in plan.units.items())
    _print_note(f"evaluating on {num_ranks} ranks by {origin}: {plan.placement}, {meshes}")
    return plan.units


def score(
    answers: Answers,
    blanked: Answers,
    right: Answers,
    training: Sequence[tuple[str, str]],
    final_text: Callable[[str], str] = str.strip,
) -> tuple[TemplateScore, ...]:
    """Count, for each template, the right answers of the model, of the model with blanked media, and of the baseline.

    `right` holds the answers of a perfect model. `final_text` leaves out the thoughts of an answer as data spells it,
    which the baseline is compared with. `training` holds (template, answer) of the training samples. The baseline gives
    a template's most frequent answer there, the first in the alphabet of equally frequent ones; to a template that
    training does not have, it gives the most frequent answer of all.
    """
    frequent = _most_frequent_answers(training)
    scores = []
    for template, questions in sorted(_by_template(answers).items()):
        baseline = frequent.get(template, frequent.get(None))
        has_media = any(question.media for question in questions)
        scores.append(
            TemplateScore(
                template,
                questions=len(questions),
                exact=sum(answers[question] == right[question] for question in questions),
                baseline=sum(baseline == final_text(question.expected) for question in questions),
                blanked=sum(blanked[question] == right[question] for question in questions) if has_media else None,
                modalities=tuple(
                    kind for kind in MEDIA_KINDS if any(getattr(question, kind) for question in questions)
                ),
            )
        )
    return tuple(scores)


def _by_template(questions: Iterable[HeldOutQuestion]) -> dict[str, list[HeldOutQuestion]]:
    by_template: dict[str, list[HeldOutQuestion]] = defaultdict(list)
    for question in questions:
        by_template[question.template].append(question)
    return by_template


def _load_recipe(run_dir: Path) -> Recipe:
    """Load the recipe of a run. Raises UserError if there is none, or if it has no held-out data."""
    recipe = load_run_recipe(run_dir)
    require_own_modules(recipe, "evaluate")
    if not recipe.data.held_out_sources:
        raise UserError(
            f"{run_dir / RECIPE_FILE}: data.validation: no held-out data to ask about; add a source of samples that "
            "training does not see, such as `validation: [{path: heldout.json}]` under `data`, or set "
            "data.validation_fraction before training"
        )
    return recipe


def _require_checkpoint(root: Path, recipe: Recipe) -> None:
    if not find(root):
        every = recipe.train.checkpoint.every
        first = f"after step {min(every, recipe.train.steps or every)}" if every else "at the end of training"
        raise CheckpointError(f"{root}: no checkpoint yet; training writes the first one {first}")


def _training_answers(recipe: Recipe, tokenizer: SampleTokenizer) -> list[tuple[str, str]]:
    """Read (template, answer) of every training sample, directly from the files: no image needs to be opened."""
    split = SampleSplit.of(recipe.data, "train")
    entries = (entry for source in recipe.data.sources for entry in read_samples(source, recipe.data.limits, split))
    answered = (entry for entry in entries if isinstance(entry, Sample) and entry.answer.strip())
    return [(sample.template or NO_TEMPLATE, tokenizer.final_text(written_text(sample.answer))) for sample in answered]


def _most_frequent_answers(training: Iterable[tuple[str, str]]) -> dict[str | None, str]:
    """Return the most frequent answer of each template, and of all together under None."""
    counts: dict[str | None, Counter[str]] = defaultdict(Counter)
    for template, answer in training:
        counts[template][answer] += 1
        counts[None][answer] += 1
    return {
        template: min(of_template, key=lambda answer: (-of_template[answer], answer))
        for template, of_template in counts.items()
    }


def _examples(answers: Answers, right: Answers) -> tuple[AnsweredQuestion, ...]:
    """Return a few questions with their answers, right or wrong, of as many templates as possible."""
    by_template = _by_template(answers)
    # (0, every template), then (1, every template), ...: the first questions of all templates come first.
    turns = sorted((nth, template) for template, questions in by_template.items() for nth in range(len(questions)))
    chosen = evenly_spaced(turns[: max(len(by_template), NUM_EXAMPLES)], NUM_EXAMPLES)
    return tuple(_example(by_template[template][nth], answers, right) for nth, template in chosen)


def _example(question: HeldOutQuestion, answers: Answers, right: Answers) -> AnsweredQuestion:
    last_text = written_text(question.asked[-1].text) if question.asked else ""
    images = tuple(map(str, question.images))
    clips = tuple(map(str, question.clips))
    return AnsweredQuestion(last_text, right[question], answers[question], images, clips)


def _report_unusable(bad: Sequence[Quarantined], index: DataIndex, recipe: Recipe) -> None:
    """Name the first of the samples that were not asked; raise TooManyBadSamples above the recipe's limit."""
    total = len(index.samples) + len(index.quarantined)
    check_bad_rate(bad, total, recipe.data.max_bad_rate)
    if bad:
        _print_note(f"{len(bad)} of {total} held-out samples are unusable and not asked; the first: {bad[0]}")


def _print_note(line: str) -> None:
    print(line, file=sys.stderr)


def whole_model(recipe: Recipe, num_ranks: int, *, sharded: bool = False) -> dict[str, UnitPlan]:
    """Return a layout in which each rank runs every unit as one stage; `sharded`: all ranks hold one copy together."""
    ranks = tuple(range(num_ranks))
    shard = num_ranks if sharded else None
    units = {}
    for unit in build_model_shape(recipe).units:
        stage = StagePlan(stage=0, layers=(0, len(unit.layers)))
        units[unit.name] = UnitPlan(tp=1, pp=1, dp=num_ranks, shard=shard, ranks=ranks, stages=(stage,))
    return units


def too_large_for_one_rank(recipe: Recipe, world: World) -> str | None:
    """Say how large a model is whose weights leave too little room on a device; None for one that fits.

    All ranks call this together.
    """
    hardware = recipe.cluster.hardware
    if world.device.type == "cpu":
        hardware = "cpu-core"
    elif hardware == "auto":
        hardware = detect_hardware(world.device)
    device = smallest_device_memory(recipe, hardware, world)
    element_bytes = ELEMENT_BYTES[precision_on_device(recipe.train.precision, world.device)]
    layers = [layer for unit in build_model_shape(recipe).units for layer in unit.layers]
    nbytes = element_bytes * sum(map(num_parameters, layers))
    if nbytes <= MAX_SHARE_OF_WEIGHTS * device.nbytes:
        return None
    return f"its weights take {nbytes / GIB:.3g} GiB, and {device.described} has {device.nbytes / GIB:.3g} GiB"
