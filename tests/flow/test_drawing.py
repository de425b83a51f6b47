"""A generator trains beside an LLM: as `diffusers` and `transformers` compute it, and alike under every plan."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mmtrain.balance import BatchMeta, IntArray, StepTargets, assign
from mmtrain.data import BatchBuilder, DataIndex, PayloadNeed, build_index
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning.artifact.plan import Plan
from mmtrain.planning.artifact.plan_graph import build_stage_graph
from mmtrain.program import LLM, Backward, build_program
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.report.runlog import METRICS_FILE
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.execution.unit_inputs import loss_scales
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
from mmtrain.runtime.verification.one_process import OneProcess
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.drawing import NUM_SAMPLES, recipe, write_samples
from tests.flow.equality import assert_close
from tests.flow.gather import copy, whole
from tests.forked_command import run_forked
from tests.models.generator.test_autoencoder import saved_vae
from tests.tiers import mostly_long

CPU = torch.device("cpu")
NUM_STEPS = 2
LR = 0.01
OPTIMIZER = {"lr": LR, "weight_decay": 0.1, "clip_norm": None, "schedule": "constant", "eps": 1e-3}
Meshes = dict[str, Mesh]
Samples = tuple[int, ...]
ALL_SAMPLES = tuple(range(NUM_SAMPLES))
BUCKETS = {"model__generator__image_size": 12, "model__generator__bucket_step": 4}
APART = {"vision": Mesh((), (0,)), "llm": Mesh((), (1,)), "generator": Mesh((), (2,))}
UNIFIED = {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1)), "generator": Mesh((), (1,))}

# name -> (recipe changes, meshes). Layers of the generator: 0 projects its context, 1 embeds patches, 2-3 are blocks.
CASES: dict[str, tuple[dict[str, Any], Meshes]] = {
    "one rank": ({}, {unit: Mesh((), (0,)) for unit in APART}),
    "unified, a stage of its own at the end": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1)), "generator": Mesh((), (2,))},
    ),
    "unified, four ranks, all recomputed": (
        {},
        {
            "vision": Mesh((), (0,), recompute=(0, 1, 2)),
            "llm": Mesh((2,), (0, 1), recompute=(0, 1, 2, 3)),
            "generator": Mesh((3,), (2, 3), recompute=(0, 1, 2, 3, 4)),
        },
    ),
    "unified, the llm's end beside the generator's start": ({}, UNIFIED),
    "disaggregated 1:1:1": ({}, APART),
    "disaggregated 1:2:1": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2), "generator": Mesh((), (3,))},
    ),
    "disaggregated 2:1:2": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (2,)), "generator": Mesh((), (3, 4), dp=2)},
    ),
    "llm tp2 with slices of tokens": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), tp=2, sp=True), "generator": Mesh((), (2,))},
    ),
    "llm tp2, generator tp2, one microbatch for two of the llm": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), tp=2), "generator": Mesh((), (2, 3), tp=2, n=2)},
    ),
    "generator of three stages behind a pipeline": (
        {},
        {"vision": Mesh((), (0,)), "llm": Mesh((1,), (0, 1)), "generator": Mesh((1, 4), (2, 3, 4))},
    ),
    "velocity, some drawn without context, weighted": (
        {
            "model__generator__prediction": "velocity",
            "model__generator__noise_schedule": "cosine",
            "model__generator__context_dropout": 0.5,
            "model__generator__loss_weight": 0.3,
        },
        APART,
    ),
    "flow, at times near noise": (
        {
            "model__generator__prediction": "flow",
            "model__generator__flow_times": "logit_normal",
            "model__generator__flow_shift": 3.0,
        },
        APART,
    ),
    "images in buckets of two sizes, one microbatch for two of the llm": (
        BUCKETS,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), dp=2), "generator": Mesh((3,), (3, 4), n=2)},
    ),
    "images in buckets of two sizes, generator tp2": (
        BUCKETS,
        {"vision": Mesh((), (0,)), "llm": Mesh((), (0, 1), tp=2), "generator": Mesh((), (2, 3), tp=2)},
    ),
    "tied, encoder and llm frozen": (
        {"model__vision__freeze": True, "model__llm__freeze": True, "model__llm__tie_embeddings": True},
        {"vision": Mesh((), (0,)), "llm": Mesh((1,), (0, 1)), "generator": Mesh((), (2,))},
    ),
}
QUICK = ("disaggregated 1:2:1",)


def freeze(*units: str) -> dict[str, Any]:
    return {f"model__{unit}__freeze": True for unit in units}


# MMScale (arXiv 2408.04275), section 7.3: what trains; projectors and queries always do.
FROZEN: dict[str, dict[str, Any]] = {
    "encoder only": freeze("llm", "generator"),
    "llm only": freeze("vision", "generator"),
    "generator only": freeze("vision", "llm"),
    "projectors only": freeze("vision", "llm", "generator"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples that answer and draw."""
    folder = tmp_path_factory.mktemp("drawing")
    write_samples(folder)
    return folder


def no_plan(*_: object) -> Plan:
    raise AssertionError("a refused run needs no plan")


def groups_of(step: int, num_groups: int, samples: Samples = ALL_SAMPLES) -> list[IntArray]:
    """Return the groups of a step: up to ten of the samples, in another order every step."""
    chosen = np.random.default_rng(step).permutation(samples)[:10]
    return [group.astype(np.int64) for group in np.array_split(chosen, num_groups)]


def batch(
    settings: Recipe,
    index: DataIndex,
    step: int,
    dp: dict[str, int],
    counts: dict[str, int],
    samples: Samples = ALL_SAMPLES,
    dispatch: bool = False,
) -> BatchMeta:
    """Return the global batch of a step; with `dispatch` any rank may compute an item."""
    groups = groups_of(step, settings.train.global_batch, samples)
    return assign(step, 0, groups, index.lengths, dp, counts, StepTargets(dispatch=dispatch))


def train(
    settings: Recipe, wanted: Plan, samples: Samples = ALL_SAMPLES
) -> tuple[list[tuple[dict[str, float], float]], list[NamedShard]]:
    """Run on every rank: loss parts by unit and the norm of each step, and this rank's gradients of the first."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), CPU)
    context = build_rank_context(settings, wanted, world)
    index = build_index(settings)
    builder = BatchBuilder(index, settings, context.needs, context.num_microbatches)
    steps, gradients = [], []
    for step in range(NUM_STEPS):
        dispatch = context.graph.dispatches_items
        meta = batch(settings, index, step, context.dp, context.num_microbatches, samples, dispatch)
        outcome = context.train(builder.build(meta), LR)
        assert outcome.stepped
        assert outcome.grad_norm is not None
        steps.append((dict(outcome.unit_losses), outcome.grad_norm))
        if step == 0:
            gradients = [copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()]
    return steps, gradients


def train_alone(settings: Recipe, samples: Samples = ALL_SAMPLES) -> list[tuple[float, dict[str, Tensor]]]:
    """Run in one process, one sample after another: loss and gradients of each step."""
    index = build_index(settings)
    once = dict.fromkeys((unit.name for unit in build_model_shape(settings).units), 1)
    needs = [PayloadNeed(unit, 0, media=True) for unit in once if unit != LLM]
    builder = BatchBuilder(index, settings, (*needs, PayloadNeed(LLM, 0, ids=True, labels=True)), once)
    alone = OneProcess(settings, CPU)

    def load(step: int, sample: int) -> StepData:
        return builder.build(assign(step, 0, [np.array([sample])], index.lengths, once, once))

    steps = []
    for step in range(NUM_STEPS):
        counts = once | {LLM: settings.train.global_batch}
        meta = batch(settings, index, step, once, counts, samples)
        scales, num_tokens = loss_scales(settings, meta), int(meta.tokens.sum())
        steps.append(alone.step(meta.sample_id.tolist(), scales, num_tokens, partial(load, step)))
    return steps


_alone: dict[str, list[tuple[float, dict[str, Tensor]]]] = {}


def assert_equals_one_process(
    folder: Path, changes: dict[str, Any], meshes: Meshes, samples: Samples = ALL_SAMPLES, **placement: Any
) -> None:
    """Compare losses and norms of all steps, and the gradients of the first, with those of one process.

    samples: of the steps. placement: more arguments of `plan`.
    """
    settings = recipe(folder, train__global_batch=4, train__optimizer=OPTIMIZER, **changes)
    wanted = plan(settings, **placement, **meshes)
    ranks = run_ranks(wanted.world_size, train, settings, wanted, samples)
    key = settings.model.model_dump_json() + str(folder) + str(samples)
    if key not in _alone:
        [_alone[key]] = run_ranks(1, train_alone, settings, samples)
    for step, (loss, gradients) in enumerate(_alone[key]):
        parts = [steps[step][0] for steps, _ in ranks]
        assert sum(sum(part.values()) for part in parts) == pytest.approx(loss, rel=1e-5)
        assert {unit for part in parts for unit in part} == {LLM, GENERATOR}
        norm = float(torch.cat([g.flatten() for g in gradients.values()]).norm())
        for steps, _ in ranks:
            assert steps[step][1] == pytest.approx(norm, rel=1e-4), f"gradient norm of step {step}"
    assert_close(whole([g for _, shards in ranks for g in shards]), _alone[key][0][1])


@pytest.mark.parametrize("case", QUICK)
def test_every_plan_computes_what_one_process_computes(folder: Path, case: str) -> None:
    assert_equals_one_process(folder, *CASES[case])


@pytest.mark.parametrize("case", mostly_long((case for case in CASES if case not in QUICK), every=2))
def test_more_plans_compute_what_one_process_computes(folder: Path, case: str) -> None:
    assert_equals_one_process(folder, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("meshes", [APART, UNIFIED], ids=["disaggregated", "unified"])
@pytest.mark.parametrize("case", FROZEN)
def test_frozen_units_leave_the_gradients_of_all_others_as_they_are(folder: Path, case: str, meshes: Meshes) -> None:
    assert_equals_one_process(folder, FROZEN[case], meshes)


def command(folder: Path, *arguments: str) -> str:
    done = run_forked(folder, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_run_goes_on_under_another_plan(folder: Path, tmp_path: Path) -> None:
    path, run = tmp_path / "recipe.json", tmp_path / "run"
    path.write_text(recipe(folder, train__checkpoint__every=2).model_dump_json(exclude_unset=True))
    train = ("train", str(path), "--run-dir", str(run))
    command(tmp_path, *train, "--set", "cluster.ranks=2", "--set", "parallel.placement=unified")
    unbroken = steps_of(run)
    shutil.rmtree(run / CHECKPOINTS_FOLDER / "step-00000004")
    apart = ("--set", "cluster.ranks=3", "--set", "parallel.placement=disaggregated")
    command(tmp_path, *train, "--resume", *apart)
    resumed = steps_of(run)
    assert resumed[:2] == unbroken[:2]
    for step, expected in zip(resumed[2:], unbroken[2:], strict=True):
        assert step["edges"].keys() != expected["edges"].keys()
        for key in ("loss", "drawing_loss", "grad_norm"):
            assert step[key] == pytest.approx(expected[key], rel=1e-4), key


@pytest.mark.slow
def test_held_out_losses_and_answers_are_those_of_any_plan(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    held_out = {"train__steps": 2, "train__validate_every": 2, "train__evaluate_every": 2}
    settings = recipe(folder, data__validation=[{"path": folder / "train.json"}], **held_out)
    path.write_text(settings.model_dump_json(exclude_unset=True))
    measured = []
    for ranks, placement in ((1, "unified"), (2, "replicated"), (3, "disaggregated")):
        run = tmp_path / f"run{ranks}"
        changes = ["--set", f"cluster.ranks={ranks}", "--set", f"parallel.placement={placement}"]
        if placement == "replicated":
            changes += ["--set", "parallel.dispatch=all"]
        command(tmp_path, "train", str(path), "--run-dir", str(run), *changes)
        measured.append(steps_of(run)[-1])
    for key in ("val_loss", "val_drawing_loss", "val_exact"):
        for step in measured[1:]:
            assert measured[0][key] == pytest.approx(step[key], rel=1e-4), key
    assert measured[0]["val_drawing_loss"] < measured[0]["val_loss"]
    result = json.loads(command(tmp_path, "evaluate", str(run), "--json", "--draw", "4", "--steps", "4"))
    assert result["exact"] == measured[-1]["val_exact"]
    assert result["drawings"]["samples"] == 4
    assert (run / "samples" / "grid.png").exists()


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / METRICS_FILE).read_text().splitlines()]


@pytest.mark.slow
def test_latents_train_too(folder: Path, tmp_path: Path) -> None:
    saved_vae(tmp_path / "vae")
    latent = {"vae": tmp_path / "vae", "latents": tmp_path / "latents", "channels": 4, "patch": 1, "image_size": 16}
    path = tmp_path / "recipe.json"
    settings = {f"model__generator__{name}": value for name, value in latent.items()}
    path.write_text(recipe(folder, **settings).model_dump_json(exclude_unset=True))
    command(tmp_path, "data", "latents", str(path))
    apart = ("--set", "cluster.ranks=3", "--set", "parallel.placement=disaggregated")
    [step, _] = json.loads(command(tmp_path, "verify", str(path), *apart, "--json"))
    assert step["differences"] == []
    assert step["loss"] == pytest.approx(step["expected_loss"], rel=1e-5)


PROJECTOR = {"model__vision__projector": {"freeze": True}}
QUERIES = {"train__freeze": ("llm.layers.0.queries",)}


@pytest.mark.parametrize(
    ("changes", "backward"),
    [
        (FROZEN["generator only"], {"vision", "llm", "generator"}),  # down to the encoder's projector
        (FROZEN["generator only"] | PROJECTOR, {"llm", "generator"}),  # down to the queries
        (FROZEN["generator only"] | PROJECTOR | QUERIES, {"generator"}),
        (freeze("llm", "generator") | QUERIES, {"vision", "llm", "generator"}),
    ],
)
def test_no_unit_runs_backward_without_anything_to_train_in_it_or_before_it(
    folder: Path, changes: dict[str, Any], backward: set[str]
) -> None:
    settings = recipe(folder, **changes)
    wanted = plan(settings, **APART)
    graph = build_stage_graph(wanted.units, wanted.schedule.num_microbatches, build_model_shape(settings))
    actions = build_program(graph).actions.values()
    assert {action.stage.unit for todo in actions for action in todo if isinstance(action, Backward)} == backward
