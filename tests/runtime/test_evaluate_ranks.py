"""Evaluation by several ranks: as a command under a launcher, also of a model that draws, and in training."""

import contextlib
import io
import itertools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from mmtrain.balance import SampleLengths
from mmtrain.checkpoint import open_newest_good
from mmtrain.errors import MmtrainError
from mmtrain.planning import Plan
from mmtrain.recipe import Recipe, load_recipe, recipe_fingerprint
from mmtrain.report import EvaluationResult
from mmtrain.runtime.evaluation.drawn_files import DRAWN_FOLDER
from mmtrain.runtime.evaluation.generate import load_weights
from mmtrain.runtime.evaluation.qa_eval import build_held_out_evaluation
from mmtrain.runtime.evaluation.score_drawings import DEFAULT_DRAWING, DrawingRequest
from mmtrain.runtime.evaluation.score_run import EvaluateRequest, run
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, PLAN_FILE, RECIPE_FILE
from mmtrain.runtime.world import World
from tests.data.rows import row
from tests.distributed import fork_ranks, run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.drawing import DIT, UNET, recipe, write_samples
from tests.flow.runs import refuse
from tests.pixels import undecodable_png
from tests.plans import plan_recipe as planner
from tests.runtime.models import CPU, evaluated, randomize, run_folder, whole
from tests.runtime.taught import Taught, asking

APART = {"vision": Mesh((), (0,)), "llm": Mesh((2,), (1, 2))}
SHARED = {"vision": Mesh((), (0,)), "llm": Mesh((), (1, 2), cp=2)}
THREE_RANKS = "evaluating on 3 ranks by the plan of its training"


def _plan(recipe: Recipe, lengths: SampleLengths, num_ranks: int) -> Plan:
    return planner(recipe, lengths, world_size=num_ranks, hardware="cpu-core", recipe_sha256=recipe_fingerprint(recipe))


def _evaluate(
    rank: int,
    world_size: int,
    _: Path,
    run_dir: Path,
    port: int,
    ranks: int = 1,
    drawing: DrawingRequest = DEFAULT_DRAWING,
    out: Path | None = None,
) -> tuple[list[EvaluationResult], str]:
    """Evaluate as one rank that torchrun started; return its output and messages."""
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    shown: list[EvaluationResult] = []
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            run(EvaluateRequest(run_dir, _plan, shown.append, ranks=ranks, drawing=drawing, out=out))
        except MmtrainError as e:
            print(e, file=said)
    return shown, said.getvalue()


@pytest.mark.parametrize(
    ("meshes", "num_ranks", "says"),
    [
        (APART, 2, "evaluating on 2 ranks by a plan made for them: "),
        pytest.param(
            APART, 3, f"{THREE_RANKS}: disaggregated, vision tp1 pp1 dp1, llm tp1 pp2 dp1", marks=pytest.mark.slow
        ),
        pytest.param(
            SHARED, 3, f"{THREE_RANKS}: disaggregated, vision tp1 pp1 dp1, llm tp1 cp2 pp1 dp1", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_score_together_what_one_scores(
    taught: Taught, tmp_path: Path, meshes: dict[str, Mesh], num_ranks: int, says: str
) -> None:
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, taught.rows), taught.model)
    settings = load_recipe(folder / RECIPE_FILE).recipe
    training = plan(settings, **meshes).model_copy(update={"recipe_sha256": recipe_fingerprint(settings)})
    training.save(folder / PLAN_FILE)
    outs = tmp_path / "by ranks.jsonl", tmp_path / "by one.jsonl"
    (first, said), *others = fork_ranks(num_ranks, _evaluate, folder, free_port(), 1, DEFAULT_DRAWING, outs[0])
    assert first == [evaluated(folder, out=outs[1])]
    by_ranks, by_one = (sorted(out.read_text().splitlines()) for out in outs)
    assert by_ranks == by_one
    assert len(by_one) == 4
    assert said.startswith(says)
    assert others == [([], "")] * (num_ranks - 1), "one rank speaks"


def test_a_launcher_decides_how_many_ranks_there_are(taught: Taught, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, taught.rows), taught.model)
    for shown, said in fork_ranks(2, _evaluate, folder, free_port(), 3):
        assert (shown, said) == ([], "--ranks: 3 found, but torchrun started 2 processes; leave it out here\n")


def test_too_many_broken_images_end_all_ranks(taught: Taught, tmp_path: Path) -> None:
    (taught.folder / "split.png").write_bytes(undecodable_png((taught.folder / "red.png").read_bytes()))
    rows = [*taught.rows, asking("colour", row("<image>What colour?", "red", "split.png", name="b1"))]
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, rows), taught.model)
    for shown, said in fork_ranks(2, _evaluate, folder, free_port()):
        assert not shown
        assert "1 of 5 samples are unusable" in said
        assert "'b1'" in said


@pytest.mark.parametrize(
    ("generator", "num_ranks", "num_samples", "holding"),
    [
        (DIT, 2, 18, "each of which holds the whole model"),
        pytest.param(DIT, 3, 18, "each of which holds the whole model", marks=pytest.mark.slow),
        pytest.param(DIT, 3, 2, "which hold shards of the model (its weights take ", marks=pytest.mark.slow),
        pytest.param(UNET, 2, 18, "which hold shards of the model (its weights take ", marks=pytest.mark.slow),
    ],
)
def test_ranks_share_the_images_to_draw(
    generator: dict[str, Any], num_ranks: int, num_samples: int, holding: str, tmp_path: Path
) -> None:
    """Draw images of two sizes, one of which is broken, as one rank does; also where a rank has none to draw."""
    write_samples(tmp_path)
    (tmp_path / "red.png").write_bytes(undecodable_png((tmp_path / "red.png").read_bytes()))
    buckets = {"image_size": 12, "bucket_step": 4, "prediction": "flow", "context_dropout": 0.1}
    data = {"data__validation": [{"path": tmp_path / "train.json"}], "data__max_bad_rate": 0.9}
    settings = recipe(tmp_path, model__generator=generator | buckets, **data)
    if "shards" in holding:
        settings = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"memory_gib": 1e-4})})
    units = whole(settings)
    randomize(units.values())
    folder = run_folder(tmp_path / "run", settings, units)
    wanted = DrawingRequest(num_samples, steps=2, guidance=2.0)
    requests = [replace(wanted, folder=tmp_path / name) for name in ("alone", "shared")]
    alone = evaluated(folder, drawing=requests[0])
    (first, said), *others = fork_ranks(num_ranks, _evaluate, folder, free_port(), 1, requests[1])
    assert said.startswith(f"evaluating on {num_ranks} ranks, {holding}")
    assert others == [([], "")] * (num_ranks - 1), "one rank speaks"
    [shared] = first
    assert shared.drawings is not None
    assert alone.drawings is not None
    assert (shared.templates, shared.drawings.images) == (alone.templates, alone.drawings.images)
    for ours, expected in zip(shared.drawings.losses, alone.drawings.losses, strict=True):
        assert (ours.loss, ours.blanked) == pytest.approx((expected.loss, expected.blanked), rel=1e-4)
    files = sorted((tmp_path / "alone" / DRAWN_FOLDER).iterdir())
    assert len(files) == shared.drawings.images >= num_samples - 2  # without those of the broken image
    assert [path.name for path in files] == sorted(os.listdir(tmp_path / "shared" / DRAWN_FOLDER))
    for path in files:
        with Image.open(path) as one, Image.open(tmp_path / "shared" / DRAWN_FOLDER / path.name) as other:
            assert np.abs(np.asarray(one, dtype=int) - np.asarray(other)).max() <= 1


def _ask_in_training(asking: list[Recipe], root: Path, plans: list[Plan]) -> list[tuple[float, ...]]:
    """Return the shares of right answers of a job with taught weights, without them, and with them again."""
    world = World(dist.get_rank(), dist.get_world_size(), CPU)
    shares: list[tuple[float, ...]] = []
    for settings, chosen in itertools.product(asking, plans):
        job = build_rank_context(settings, chosen, world)
        evaluate = build_held_out_evaluation(job)
        params = [p for unit in job.units.values() for stage in unit.stages.values() for p in stage.parameters()]
        untaught = [p.detach().clone() for p in params]
        shares_by_weights = []
        for weights_are_taught in (True, False, True):
            for unit in job.units.values():
                load_weights(unit, open_newest_good(root, refuse))
            if not weights_are_taught:
                with torch.no_grad():
                    for param, value in zip(params, untaught, strict=True):
                        param.copy_(value)
            shares_by_weights.append(evaluate().exact)
        shares.append(tuple(shares_by_weights))
    return shares


@pytest.mark.slow  # 7 s
def test_a_job_asks_the_model_that_it_trains(taught: Taught, tmp_path: Path) -> None:
    """Evaluate with the units of training as they are, sequence-parallel where training is."""
    folder = run_folder(tmp_path / "run", taught.recipe(taught.rows, taught.rows), taught.model)
    settings = load_recipe(folder / RECIPE_FILE).recipe
    # Of two microbatches or replicas, one has nothing to do with a single question.
    changes = [{"evaluate_every": 1, "evaluate_questions": count} for count in (3, 1)]
    asking = [settings.model_copy(update={"train": settings.train.model_copy(update=c)}) for c in changes]
    plans = [
        plan(settings, vision=Mesh((), (0, 1), tp=2, sp=True), llm=Mesh((1,), (0, 1, 2, 3), tp=2, sp=True)),
        plan(settings, vision=Mesh((), (0, 1), dp=2), llm=Mesh((), (2, 3), dp=2)),
        plan(settings, shard=2, vision=Mesh((), (0, 1, 2, 3), dp=4), llm=Mesh((), (0, 1, 2, 3), dp=4)),
        plan(settings, vision=Mesh((), (0, 1), dp=2), llm=Mesh((1,), (0, 1, 2, 3), cp=2, method="ring", split="even")),
    ]
    for shares in run_ranks(4, _ask_in_training, asking, folder / CHECKPOINTS_FOLDER, plans):
        assert len(shares) == len(asking) * len(plans)
        for taught_share, untaught_share, again in shares:
            assert taught_share == again == 1.0
            assert untaught_share < 1.0
