"""Runs that start from folders of all families, under several plans, and the folders that are exported from them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mmtrain.balance import assign
from mmtrain.checkpoint import open_newest_good
from mmtrain.data import BatchBuilder, build_index
from mmtrain.families import FAMILIES
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import Plan
from mmtrain.planning.whatif import plan_again
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
from mmtrain.runtime.training.train_request import TrainRequest
from mmtrain.runtime.world import World
from mmtrain.weights import export_folder, open_pretrained
from tests.distributed import run_ranks
from tests.flow.gather import copy, whole
from tests.flow.runs import refuse, run_all
from tests.flow.tiny_families import MESH, TINY_FAMILIES, TinyFamily, load_tiny_recipe
from tests.plans import plan_recipe as planner
from tests.tiers import mostly_long
from tests.weights.comparison import assert_equal_gradients, content

PLANNED = [(name, placement) for name, tiny in TINY_FAMILIES.items() for placement in tiny.parallel]
# The way to the checkpoint is the same for all families: the encoders of four try every placement.
EVERYWHERE = {"gemma3", "internvl", "qwen2_audio", "qwen3_vl"}
TRAINED = [(name, placement) for name, placement in PLANNED if placement == "unified" or name in EVERYWHERE]
OF_THEIR_OWN = {"llava_onevision": "test_joined_tiles.py", "qwen2_5_omni": "test_pretrained_omni.py"}


@dataclass(frozen=True)
class Expected:
    """A tiny model, and what `transformers` computes with it."""

    folder: Path
    model: nn.Module  # with gradients of the loss
    loss: float


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Expected]:
    @cache
    def compute(name: str) -> Expected:
        folder = tmp_path_factory.mktemp("families") / "model"
        tiny = TINY_FAMILIES[name]
        tiny.write(folder)
        model = tiny.open(folder)
        _, parallel = tiny.parallel["unified"]
        loss = tiny.loss(model, folder, load_tiny_recipe(folder, parallel).recipe)
        loss.backward()
        return Expected(folder, model, loss.item())

    return compute


def test_every_family_is_in_the_table() -> None:
    assert {tiny.family.name for tiny in TINY_FAMILIES.values()} | OF_THEIR_OWN.keys() == set(FAMILIES)


def _train_one_step(recipe: Recipe, plan: Plan) -> tuple[float, list[NamedShard]]:
    """Train on the held-out samples."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(recipe, plan, world, pretrained=open_pretrained(recipe))
    index, counts = build_index(recipe, "validation"), context.num_microbatches
    groups = np.array_split(np.arange(len(index.samples)), context.dp["llm"] * counts["llm"])
    meta = assign(0, 0, groups, index.lengths, context.dp, counts)
    outcome = context.train(BatchBuilder(index, recipe, context.needs, counts).build(meta), lr=0.01)
    return outcome.loss, [copy(g) for unit in context.optimizer.units.values() for g in unit.gradients()]


@pytest.mark.parametrize(("name", "placement"), mostly_long(PLANNED, every=3))
def test_a_step_under_any_plan_equals_one_of_transformers(
    name: str, placement: str, expected: Callable[[str], Expected]
) -> None:
    """Compare loss and all gradients of samples without media, with one and with two."""
    tiny, theirs = TINY_FAMILIES[name], expected(name)
    num_ranks, parallel = tiny.parallel[placement]
    recipe = load_tiny_recipe(theirs.folder, parallel).recipe
    index = build_index(recipe, "validation")
    if tiny.encoders:
        assert {sum(map(len, sample.media.values())) for sample in index.samples} >= {0, 1, 2}
    plan = planner(recipe, index.lengths, world_size=num_ranks, hardware="cpu-core", recipe_sha256="")
    if placement in ("unified", "colocated"):
        llm = plan.units["llm"]
        assert (llm.tp, llm.dp, llm.vpp, plan.world_size) == (2, 1, 2, 4)
    _assert_equal_step(tiny, theirs, recipe, plan)


@pytest.mark.slow
def test_a_step_of_encoder_replicas_on_a_tp_group_equals_one_of_transformers(
    expected: Callable[[str], Expected],
) -> None:
    tiny, theirs = TINY_FAMILIES["internvl"], expected("internvl")
    recipe = load_tiny_recipe(theirs.folder, f"{{placement: unified, vision: {{tp: 1}}, llm: {MESH}}}").recipe
    lengths = build_index(recipe, "validation").lengths
    plan = planner(recipe, lengths, world_size=4, hardware="cpu-core", recipe_sha256="")
    assert [(unit.tp, unit.dp, unit.sp) for unit in plan.units.values()] == [(1, 2, False), (2, 1, True)]
    _assert_equal_step(tiny, theirs, recipe, plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "split"), [("mistral3", "auto"), ("mistral3", "even"), ("gemma4_text", "auto")])
def test_a_step_of_shared_sequences_equals_one_of_transformers(
    name: str, split: str, expected: Callable[[str], Expected]
) -> None:
    """Queries of tokens far into a sample grow, whichever rank has them; ranks read keys and values of their tokens."""
    tiny, theirs = TINY_FAMILIES[name], expected(name)
    parallel = f"{{placement: unified, llm: {{tp: 1, pp: 2, cp: 2, cp_split: {split}}}}}"
    recipe = load_tiny_recipe(theirs.folder, parallel).recipe
    lengths = build_index(recipe, "validation").lengths
    plan = planner(recipe, lengths, world_size=4, hardware="cpu-core", recipe_sha256="")
    assert (plan.units["llm"].cp, plan.units["llm"].pp) == (2, 2)
    _assert_equal_step(tiny, theirs, recipe, plan)


@pytest.mark.slow
def test_a_step_of_sharded_replicas_equals_one_of_transformers(expected: Callable[[str], Expected]) -> None:
    """Gradients of keys and values come from later blocks, whose weights were gathered and freed by then."""
    tiny, theirs = TINY_FAMILIES["gemma4_text"], expected("gemma4_text")
    recipe = load_tiny_recipe(theirs.folder, "{placement: replicated, shard: 2}").recipe
    lengths = build_index(recipe, "validation").lengths
    plan = planner(recipe, lengths, world_size=2, hardware="cpu-core", recipe_sha256="")
    _assert_equal_step(tiny, theirs, recipe, plan)


def _assert_equal_step(tiny: TinyFamily, theirs: Expected, recipe: Recipe, plan: Plan) -> None:
    """Train one step by the plan; compare loss and gradients with those of `transformers`."""
    ranks = run_ranks(plan.world_size, _train_one_step, recipe, plan)
    assert sum(part for part, _ in ranks) == pytest.approx(theirs.loss, rel=1e-4)
    gradients = whole([shard for _, shards in ranks for shard in shards])
    assert_equal_gradients(theirs.folder, theirs.model, gradients, tiny.untrained)


def _request(tiny: TinyFamily, folder: Path, placement: str) -> tuple[TrainRequest, int]:
    """Ask for three steps of training, beside the folder; return the number of ranks too."""
    num_ranks, parallel = tiny.parallel[placement]
    loaded = load_tiny_recipe(folder, parallel)
    return TrainRequest(loaded, planner, plan_again, "cpu-core", num_ranks, folder.parent / "run"), num_ranks


@pytest.mark.slow
@pytest.mark.parametrize(("name", "placement"), TRAINED)
def test_a_trained_model_has_the_same_loss_and_answers_in_transformers(
    name: str, placement: str, tmp_path: Path
) -> None:
    """Train for three steps, export, and let `transformers` compute the loss and answer the held-out questions."""
    folder, out, tiny = tmp_path / "model", tmp_path / "out", TINY_FAMILIES[name]
    tiny.write(folder)
    request, num_ranks = _request(tiny, folder, placement)
    with torch.no_grad():
        untrained_loss = tiny.loss(tiny.open(folder), folder, request.recipe).item()
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    our_loss = read_metrics(request.run_dir)[-1]["val_loss"]
    with torch.no_grad():
        assert our_loss == pytest.approx(tiny.loss(tiny.open(out), out, request.recipe).item(), rel=1e-4)
    assert abs(our_loss - untrained_loss) > 1e-2, "three steps changed nothing"
    tiny.assert_same_answers(request.recipe, checkpoint, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "qwen3_omni_moe", "qwen3_vl"])
def test_text_alone_leaves_a_frozen_tower_as_it_was_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder, out, tiny = tmp_path / "model", tmp_path / "out", TINY_FAMILIES[name]
    tiny.write(folder)
    for source, target in (("train", "some"), ("heldout", "others")):
        rows = json.loads((folder / "conversations" / f"{source}.json").read_text(encoding="utf-8"))
        texts = [row for row in rows if not any(row.get(key) for key in ("image", "images", "audios"))]
        (folder / "conversations" / f"{target}.json").write_text(json.dumps(texts), encoding="utf-8")
    num_ranks, parallel = tiny.parallel["colocated"]
    frozen = [f"model.{unit}.{part}=true" for unit in tiny.encoders for part in ("freeze", "projector.freeze")]
    loaded = load_tiny_recipe(folder, parallel, *frozen)
    request = TrainRequest(loaded, planner, plan_again, "cpu-core", num_ranks, tmp_path / "run")
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    checkpoint = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    export_folder(load_run_recipe(request.run_dir), checkpoint, out)
    before, after = content(folder), content(out)
    assert before.keys() == after.keys()
    towers = ("visual.", "vision_tower.", "audio_tower.", "multi_modal_projector.", "embed_vision.")
    never_trained = (*towers, ".layer_scalar")
    of_llm = {tensor for tensor in before if not any(part in tensor for part in never_trained)}
    assert {tensor for tensor in before if before[tensor] != after[tensor]} == of_llm
    assert len(before) > len(of_llm) > 0


@pytest.mark.slow
def test_a_run_from_a_folder_is_resumed_without_its_weights(tmp_path: Path) -> None:
    folder, tiny = tmp_path / "model", TINY_FAMILIES["qwen2"]
    tiny.write(folder)
    request, num_ranks = _request(tiny, folder, "unified")
    assert run_all(*[request] * num_ranks) == [""] * num_ranks
    (folder / "model.safetensors").unlink()
    parallel = tiny.parallel["unified"][1]
    more = load_tiny_recipe(folder, parallel, "train.steps=4", "train.validate_every=0")
    assert run_all(*[replace(request, loaded=more, resume=True)] * num_ranks) == [""] * num_ranks
    assert open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse).step == 4

    # Another model under the same name is another run.
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text(encoding="utf-8")), "max_position_embeddings": 7}))
    more = load_tiny_recipe(folder, parallel, "train.steps=5")
    assert "model.hf: " in run_all(*[replace(request, loaded=more, resume=True)] * num_ranks)[0]
