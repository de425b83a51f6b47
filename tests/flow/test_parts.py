"""The master test of programs in parts, cut and filled at random: whatever the checker lets pass computes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mmtrain.costs import AnalyticCosts, machine_for
from mmtrain.errors import ProgramError
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.planning import Plan
from mmtrain.planning.artifact.plan_graph import stage_graph
from mmtrain.planning.colocated.encoder_order import plan_encoder_order
from mmtrain.planning.layer_costs.layer_costs import LayerCosts
from mmtrain.program import Fill, Program, action_to_text, build_1f1b, build_coarse, check_program, lower
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import run_ranks
from tests.faults import FailAt
from tests.flow.cases import AUDIO, DEEPSTACK, Mesh, Order, plan, recipe, step_data
from tests.flow.cells import ADAPTED
from tests.flow.equality import assert_equals_one_process
from tests.flow.orders import TOGETHER
from tests.planning.factory import problem_for
from tests.program.parts import fill

MAX_SEEDS = 400

# name -> (recipe changes, meshes, whether encoders work before and after the LLM, gaps to fill at least)
CASES: dict[str, tuple[dict[str, Any], dict[str, Mesh], bool, int]] = {
    "unified pp2 dp2": ({}, {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), dp=2)}, False, 2),
    "the encoder is the first round, recomputed": (
        {},
        {"vision": Mesh((2,), (0, 1), recompute=(1, 2)), "llm": Mesh((2,), (0, 1), recompute=(1, 2, 3, 4))},
        False,
        2,
    ),
    "unified tp2 with slices of tokens, tied, partly frozen": (
        {"model__llm__tie_embeddings": True, "train__freeze": ("vision.layers.[01].*", "llm.layers.2.*")},
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
        False,
        2,
    ),
    "three units on two ranks, vpp2": (
        {"model__audio": AUDIO},
        {
            "vision": Mesh((), (0, 1), dp=2),
            "audio": Mesh((2,), (0, 1)),
            "llm": Mesh((1, 2, 3), (0, 1), vpp=2),
        },
        True,
        1,
    ),
    "an encoder's microbatches merged": ({}, {"vision": Mesh((), (0,), n=2), "llm": Mesh((3,), (0, 1))}, False, 2),
    "disaggregated, cut only": ({}, {"vision": Mesh((2,), (0, 1)), "llm": Mesh((), (2, 3), dp=2)}, False, 0),
}


# Encoder and LLM are cut inside their layers: whole tokens, and slices of them.
INSIDE: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    "an encoder on each rank of the TP group, a layer recomputed": (
        {},
        {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, recompute=(3,))},
    ),
    "slices of tokens, partly frozen": (
        {"train__freeze": ("vision.layers.[01].*", "llm.layers.2.*")},
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
    "windows and rows of images, slices of tokens": (
        {
            "model__vision__positions": "rotary",
            "model__vision__window": 2,
            "model__vision__full_attention_blocks": (1,),
            "model__vision__norm": "rms",
            "model__vision__gated_mlp": True,
            "model__vision__activation": "silu",
            "model__llm__rope_sections": (1, 1, 1),
        },
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
    "deepstack, slices of tokens": (
        DEEPSTACK,
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
    "adapters": (
        ADAPTED,
        {"vision": Mesh((), (0, 1), tp=2), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, recompute=(3,))},
    ),
    "adapters, slices of tokens": (
        ADAPTED,
        {"vision": Mesh((), (0, 1), tp=2, sp=True), "llm": Mesh((2,), (0, 1, 2, 3), tp=2, sp=True)},
    ),
}


def in_pieces(chosen: Plan) -> Plan:
    """The plan with segments that are pieces of layers."""
    return chosen.model_copy(update={"schedule": chosen.schedule.model_copy(update={"pieces": True})})


def in_parts(settings: Recipe, meshes: dict[str, Mesh], coarse: bool, gaps: int, inside: bool = False) -> Order:
    """The first order, of those drawn one after another, that passes the checker and fills so many gaps."""
    chosen = plan(settings, **meshes)
    graph = stage_graph(in_pieces(chosen) if inside else chosen, build_model_shape(settings))
    whole = (build_coarse if coarse else build_1f1b)(graph)
    for seed in range(MAX_SEEDS):
        program = Program(graph, {rank: fill(graph, todo, seed) for rank, todo in whole.actions.items()})
        if sum(isinstance(a, Fill) for todo in program.actions.values() for a in todo) < gaps:
            continue
        try:
            check_program(lower(program))
        except ProgramError:
            continue
        return {rank: tuple(map(action_to_text, todo)) for rank, todo in program.actions.items()}
    raise AssertionError(f"none of {MAX_SEEDS} orders with {gaps} filled gaps runs")


@pytest.mark.parametrize("case", CASES)
def test_parts_and_gaps_compute_what_one_process_does(case: str) -> None:
    changes, meshes, coarse, gaps = CASES[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, "explicit", in_parts(settings, meshes, coarse, gaps), **meshes))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * c.startswith(("adapters", "windows", "deepstack", "slices")))
        for c in INSIDE
    ],
)
def test_pieces_of_layers_compute_what_one_process_does(case: str) -> None:
    changes, meshes = INSIDE[case]
    settings = recipe(**changes)
    order = in_parts(settings, meshes, coarse=False, gaps=2, inside=True)
    assert_equals_one_process(settings, in_pieces(plan(settings, "explicit", order, **meshes)), texts_between=True)


def test_a_planned_order_in_pieces_computes_what_one_process_does() -> None:
    """As planned for GPUs whose kernels start at once: pieces of other microbatches stand beside collectives."""
    settings, meshes = recipe(), {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), tp=2)}
    graph = stage_graph(in_pieces(plan(settings, **meshes)), build_model_shape(settings))
    machine = replace(machine_for(settings, "h100-80g"), kernel_launch_s=0.0)
    layer_costs = LayerCosts(replace(problem_for(settings, "h100-80g"), costs=AnalyticCosts(machine, "bf16")))
    order = plan_encoder_order(graph, layer_costs, machine)
    assert any(line.startswith(("PF llm", "PB llm")) for line in order[0]), "the LLM's layers are hosts"
    assert_equals_one_process(settings, in_pieces(plan(settings, "explicit", order, **meshes)))


def test_ranks_of_a_host_have_guests_of_their_own() -> None:
    """Each rank of a tensor-parallel LLM holds a replica of the encoder, whose segments lie in the same gaps."""
    settings, meshes = recipe(), {"vision": Mesh((), (0, 1), dp=2), "llm": Mesh((), (0, 1), tp=2)}
    order = {rank: tuple(line.replace("vision:0", f"vision:{rank}") for line in TOGETHER) for rank in (0, 1)}
    assert_equals_one_process(settings, plan(settings, "explicit", order, **meshes))


def _validate_train_spoil() -> tuple[float, float, bool, bool]:
    """The loss of a batch without training it and with; whether a good step was taken, and one spoiled by NaN."""
    settings, meshes = recipe(), {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}
    faults = FailAt(0, 1, "nan")
    faults.start(0)
    chosen = plan(settings, "explicit", {0: TOGETHER}, **meshes)
    job = build_rank_context(settings, chosen, World(0, 1, torch.device("cpu")), faults=faults)
    validated = job.validate(step_data(job, 0)).loss
    good, spoiled = job.train(step_data(job, 0), 0.01), job.train(step_data(job, 1), 0.01)
    return validated, good.loss, good.stepped, spoiled.stepped


def test_programs_in_parts_validate_and_refuse_broken_steps() -> None:
    [(validated, trained, good, spoiled)] = run_ranks(1, _validate_train_spoil)
    assert validated == trained
    assert good
    assert not spoiled
