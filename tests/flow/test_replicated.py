"""Units that are sharded over all ranks (`replicated`) compute what one process does."""

from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mmtrain.checkpoint import save
from mmtrain.cli.app import app
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import load_plan
from mmtrain.planning.artifact.plan import Plan, UnitPlan
from mmtrain.program import Backward, DispatchMode
from mmtrain.program.schedules.builder import ScheduleKind
from mmtrain.recipe import Recipe
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.checkpointing import SavedRank, checkpoint_ranks, restore_checkpoint, take_snapshot
from mmtrain.runtime.execution.rank_context import RankContext, build_rank_context
from mmtrain.runtime.run_folder import PLAN_FILE
from mmtrain.runtime.world import World
from tests.distributed import RanksFailed, run_ranks
from tests.faults import FailAt
from tests.flow.cases import (
    AUDIO,
    DEEPSTACK,
    FINE,
    HEARD,
    LONG,
    RESAMPLED,
    Mesh,
    batch,
    plan,
    recipe,
    samples_of,
    step_data,
)
from tests.flow.cells import ADAPTED, DROPPING, FROZEN, LLM_KINDS, RECOMPUTED, VISION_KINDS
from tests.flow.equality import NUM_STEPS, assert_equals_one_process
from tests.flow.gather import copy, whole
from tests.flow.runs import REPLICATED, assert_same_end, refuse, request_for, run_all
from tests.tiers import mostly_long


def replicated(
    settings: Recipe,
    num_ranks: int,
    shard: int | None,
    recompute: tuple[int, ...] = (),
    dispatch: DispatchMode | None = None,
    encoder_first_in: int | None = None,
    tp: int = 1,
    sp: bool = False,
    tp_chunks: int = 1,
    **context: Any,
) -> Plan:
    """Return a plan in which each TP group of `num_ranks` ranks runs every unit, and `shard` of them hold one copy.

    shard: None with a `dispatch` for weights that are whole on every rank (`parallel.zero: 1`).
    encoder_first_in: mini-batches of encoders that run before and after the LLM.
    context: `cp` and other fields of the LLM's mesh that say how ranks share sequences.
    """
    ranks = tuple(range(num_ranks))
    mesh = Mesh((), ranks, dp=num_ranks // tp, recompute=recompute, tp=tp, sp=sp, tp_chunks=tp_chunks)
    llm = replace(mesh, dp=mesh.dp // context.get("cp", 1), **context)
    encoders = dict.fromkeys(settings.model.all_encoders, replace(mesh, n=encoder_first_in or 0))
    kind: ScheduleKind = "1f1b" if encoder_first_in is None else "encoder_first"
    return plan(settings, kind, shard=shard, dispatch=dispatch, **encoders, llm=llm)


def offloaded(mode: str) -> dict[str, Any]:
    """Return changes of a recipe whose recomputed blocks use host memory."""
    return {f"parallel__{unit}__offload": mode for unit in ("vision", "llm")}


SPEECH: dict[str, Any] = {"model__audio": AUDIO}
TIED: dict[str, Any] = {"model__llm__tie_embeddings": True}
BY_ALL_GATHER: dict[str, Any] = {"parallel__placement": "replicated", "parallel__exchange": "all_gather"}
ZERO_2: dict[str, Any] = {"parallel__placement": "replicated", "parallel__zero": 2}
TWO_NODES: dict[str, Any] = {"cluster__ranks_per_node": 2}
ALL = (0, 1, 2, 3, 4)
FROZEN_VISION: dict[str, Any] = {"model__vision__freeze": True}
FROZEN_PROJECTOR: dict[str, Any] = FROZEN_VISION | {"model__vision__projector__freeze": True}
# name -> (recipe changes, ranks, shard or None for whole weights, recomputed layers, whether every second step has
# text alone[, dispatch[, mini-batches of encoders that run first]])
Case = (
    tuple[dict[str, Any], int, int, tuple[int, ...], bool]
    | tuple[dict[str, Any], int, int | None, tuple[int, ...], bool, DispatchMode]
    | tuple[dict[str, Any], int, int | None, tuple[int, ...], bool, DispatchMode, int]
)
CASES: dict[str, Case] = {
    "two ranks, one copy": ({}, 2, 2, (), False),
    "adapters with dropout, all dispatched": (DROPPING, 2, 2, (2,), True, "all"),
    "four ranks, two copies, audio, tied, recomputed, texts between": (SPEECH | TIED, 4, 2, ALL, True),
    "all dispatched on two nodes, audio, texts between": (SPEECH | TWO_NODES, 4, 2, (), True, "all"),
    "encoders first in one, all dispatched, audio, texts between": (SPEECH, 4, 2, (), True, "all", 1),
    "kept weights, two copies, audio, tied, all dispatched": (SPEECH | TIED | ZERO_2, 4, 2, (), True, "all"),
}
MORE: dict[str, Case] = {
    "all dispatched by all-gather, texts between": (BY_ALL_GATHER | SPEECH, 4, 2, (), True, "all"),
    "all dispatched by all-gather, microbatches of one sample": (
        BY_ALL_GATHER | SPEECH | {"train__global_batch": 8},
        4,
        4,
        ALL,
        False,
        "all",
    ),
    "all dispatched without regard to two nodes": (
        SPEECH | TWO_NODES | {"parallel__node_wise": False},
        4,
        2,
        (),
        True,
        "all",
    ),
    "all dispatched, one rank": ({}, 1, 1, (), False, "all"),
    "kept weights, two copies, recomputed": (SPEECH | TIED | ZERO_2, 4, 2, ALL, True),
    "kept weights, one copy, microbatches of one sample": (ZERO_2 | {"train__global_batch": 8}, 2, 2, (), True, "llm"),
    "kept weights, one rank": (ZERO_2, 1, 1, (), False),
    "kept weights, frozen encoder and projector": (FROZEN_PROJECTOR | SPEECH | ZERO_2, 2, 2, (), True, "all"),
    "kept weights, frozen llm": ({"model__llm__freeze": True} | ZERO_2, 2, 2, (), True, "none"),
    "kept weights, adapters": (ADAPTED | ZERO_2, 2, 1, (), True, "all"),
    "kept weights, encoders first in one": (SPEECH | ZERO_2 | {"train__global_batch": 8}, 4, 2, (), True, "all", 1),
    "kept weights, encoders first in two, recomputed": (ZERO_2, 2, 2, ALL, True, "llm", 2),
    "whole weights, all dispatched on two nodes, audio": (SPEECH | TIED | TWO_NODES, 4, None, ALL, True, "all"),
    "whole weights, all dispatched by all-gather, some frozen": (
        BY_ALL_GATHER | SPEECH | FROZEN_PROJECTOR,
        4,
        None,
        (),
        True,
        "all",
    ),
    "whole weights, encoders first in one": (SPEECH, 4, None, (), True, "all", 1),
    "whole weights, encoders first in two, adapters": (ADAPTED, 2, None, ALL, True, "llm", 2),
    "whole weights, microbatches of one sample": (SPEECH | {"train__global_batch": 8}, 4, None, (), True, "all"),
    "whole weights, frozen llm": ({"model__llm__freeze": True} | SPEECH, 2, None, ALL, True, "all"),
    "whole weights, nothing dispatched": (SPEECH, 2, None, (), True, "none"),
    "all dispatched, one copy, recomputed": (SPEECH | TIED, 4, 4, ALL, True, "all"),
    "all dispatched, two copies": (SPEECH, 2, 1, (), True, "all"),
    "all dispatched, frozen encoder": ({"model__vision__freeze": True} | SPEECH, 4, 2, (), True, "all"),
    "all dispatched, frozen encoder and projector": (
        {"model__vision__freeze": True, "model__vision__projector__freeze": True} | SPEECH,
        4,
        2,
        (),
        True,
        "all",
    ),
    "all dispatched, frozen llm": ({"model__llm__freeze": True} | SPEECH, 2, 2, ALL, True, "all"),
    "all dispatched, deepstack, microbatches of one sample": (
        DEEPSTACK | {"train__global_batch": 8},
        4,
        2,
        (),
        True,
        "all",
    ),
    "all dispatched, two encoders of images": ({"model__encoders": {"fine": FINE}}, 4, 2, (), True, "all"),
    "llm dispatched": (SPEECH, 4, 2, (), True, "llm"),
    "all dispatched, a resampler, recomputed": ({"model__encoders": {"resampled": RESAMPLED}}, 4, 2, ALL, True, "all"),
    "nothing dispatched": (SPEECH, 4, 2, (), True, "none"),
    "one rank": ({}, 1, 1, (), False),
    "two copies": ({}, 2, 1, (), True),
    "four copies, recomputed": (TIED, 4, 1, (1, 3), True),
    "four copies, inputs in host memory": (TIED | offloaded("inputs"), 4, 1, (1, 3), True),
    "two copies, all in host memory": (SPEECH | offloaded("all"), 4, 2, ALL, True),
    "four ranks, one copy": (SPEECH, 4, 4, (), True),
    "frozen encoder": ({"model__vision__freeze": True}, 2, 2, (), True),
    "frozen encoder and projector": (
        {"model__vision__freeze": True, "model__vision__projector__freeze": True},
        2,
        2,
        (),
        True,
    ),
    "frozen llm": ({"model__llm__freeze": True}, 2, 2, (), True),
    "frozen llm, two copies, recomputed": ({"model__llm__freeze": True} | SPEECH, 4, 2, ALL, True),
    "ends frozen": ({"train__freeze": ("vision.layers.[01].*", "llm.layers.[04].*")}, 2, 2, (), True),
    "parts frozen": (
        {"train__freeze": ("*norm.weight", "llm.layers.2.*", "vision.layers.2.mlp.*")} | TIED,
        4,
        2,
        (2,),
        True,
    ),
    "adapters": (ADAPTED, 2, 2, (), True),
    "deepstack, recomputed": (DEEPSTACK, 2, 2, ALL, True),
    "rates and decays of units, clipped": (
        {
            "model__vision__weight_decay": 0.5,
            "model__vision__lr_scale": 0.5,
            "train__optimizer__clip_norm": 0.05,
        },
        4,
        2,
        (),
        False,
    ),
    "layer-wise decay of the learning rate": ({"train__optimizer__layer_lr_decay": 0.5} | TIED, 4, 2, (), False),
    "microbatches of one sample": ({"train__global_batch": 8}, 2, 2, (), True),
    "encoders first in as many, all dispatched": (SPEECH, 4, 2, (), True, "all", 2),
    "encoders first in one, llm dispatched": (SPEECH, 4, 2, (), True, "llm", 1),
    "encoders first in two, llm dispatched, recomputed": (SPEECH | TIED, 2, 2, ALL, True, "llm", 2),
    "encoders first in one, nothing dispatched": (SPEECH, 4, 2, (), True, "none", 1),
    "encoders first in one, all dispatched, recomputed": (SPEECH | TIED, 4, 4, ALL, True, "all", 1),
    "encoders first in one, all dispatched, two copies": (SPEECH, 2, 1, (), True, "all", 1),
    "encoders first in one, one rank": ({}, 1, 1, (), True, "all", 1),
    "encoders first in one, frozen encoder": (FROZEN_VISION | SPEECH, 4, 2, (), True, "all", 1),
    "encoders first in two, frozen encoder, recomputed": (FROZEN_VISION, 2, 2, ALL, True, "none", 2),
    "encoders first in one, frozen encoder and projector": (FROZEN_PROJECTOR | SPEECH, 4, 2, (), True, "all", 1),
    "encoders first in one, frozen llm": ({"model__llm__freeze": True} | SPEECH, 2, 2, (), True, "all", 1),
    "encoders first in one, ends frozen": (
        {"train__freeze": ("vision.layers.[01].*", "llm.layers.[04].*")},
        2,
        2,
        (),
        True,
        "all",
        1,
    ),
    "encoders first in one, adapters": (ADAPTED, 2, 2, (), True, "all", 1),
    "encoders first in two, deepstack": (DEEPSTACK | {"train__global_batch": 8}, 2, 2, (), True, "all", 2),
    "encoders first in one, two encoders of images": ({"model__encoders": {"fine": FINE}}, 4, 2, (), True, "all", 1),
}


@pytest.mark.parametrize("case", [*CASES, *mostly_long(MORE, every=3)])
def test_sharded_units_compute_what_one_process_does(case: str) -> None:
    changes, num_ranks, shard, recompute, texts_between, *dispatch = (CASES | MORE)[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, replicated(settings, num_ranks, shard, recompute, *dispatch), texts_between)


# name -> (recipe changes, ranks, tp, sequence parallelism, shard or None for whole weights, recomputed layers[,
# dispatch[, mini-batches of encoders that run first[, chunks of tokens]]])
SplitCase = tuple[Any, ...]
CLIPPED: dict[str, Any] = {"train__optimizer__clip_norm": 0.05}
WITH_TP: dict[str, SplitCase] = {
    "one copy of two parts": (CLIPPED, 4, 2, False, 2, ()),
    "sequence parallel, audio, tied, recomputed, all dispatched": (SPEECH | TIED | CLIPPED, 4, 2, True, 2, ALL, "all"),
}
MORE_WITH_TP: dict[str, SplitCase] = {
    "two copies of two parts": (SPEECH, 4, 2, False, 1, (), "llm"),
    "sequence parallel, two copies of two parts, parts frozen": (
        SPEECH | TIED | {"train__freeze": ("*norm.weight", "llm.layers.2.*", "vision.layers.2.mlp.*")},
        4,
        2,
        True,
        1,
        (2,),
        "none",
    ),
    "no replicas": (TIED, 2, 2, True, 1, ()),
    "sequence parallel, adapters, encoders first": (ADAPTED, 4, 2, True, 2, ALL, "llm", 1),
    "frozen encoder, all dispatched by all-gather": (BY_ALL_GATHER | FROZEN_VISION | SPEECH, 4, 2, True, 2, (), "all"),
    "frozen llm, encoders first, all dispatched": ({"model__llm__freeze": True} | SPEECH, 4, 2, False, 2, (), "all", 1),
    "weights gathered once a step": (ZERO_2 | SPEECH, 4, 2, True, 2, (), "none"),
    "norms of heads": ({"model__llm__qk_norm": True}, 4, 2, False, 2, ()),
    "deepstack, linears in chunks": (DEEPSTACK, 4, 2, True, 2, ALL, "all", None, 2),
    "whole weights, sequence parallel, all dispatched": (SPEECH | TIED, 4, 2, True, None, ALL, "all"),
    "two nodes, microbatches of one sample": (
        SPEECH | TWO_NODES | {"train__global_batch": 8},
        4,
        2,
        True,
        2,
        (),
        "all",
    ),
}


@pytest.mark.parametrize("case", [*WITH_TP, *mostly_long(MORE_WITH_TP, every=2)])
def test_sharded_parts_of_units_compute_what_one_process_does(case: str) -> None:
    """With tensor parallelism the ranks at one place of the TP groups share the part of that place."""
    changes, num_ranks, tp, sp, shard, recompute, *dispatch = (WITH_TP | MORE_WITH_TP)[case]
    settings = recipe(**changes)
    chunks = dispatch[2] if len(dispatch) > 2 else 1
    chosen = replicated(settings, num_ranks, shard, recompute, *dispatch[:2], tp=tp, sp=sp, tp_chunks=chunks)
    assert_equals_one_process(settings, chosen, texts_between=True)


RING: dict[str, Any] = {"cp": 2, "method": "ring", "split": "even"}
ULYSSES: dict[str, Any] = {"cp": 2, "split": "even"}
# name -> (recipe changes, ranks, shard or None for whole weights, further arguments of `replicated`)
WITH_CP: dict[str, tuple[dict[str, Any], int, int | None, dict[str, Any]]] = {
    "ulysses, one copy": (CLIPPED, 2, 2, ULYSSES | {"dispatch": "none"}),
    "ring, copies of two ranks each, audio, tied, recomputed": (
        SPEECH | TIED | CLIPPED,
        4,
        2,
        RING | {"recompute": ALL, "dispatch": "llm"},
    ),
}
MORE_WITH_CP: dict[str, tuple[dict[str, Any], int, int | None, dict[str, Any]]] = {
    "ulysses, one copy of four": (SPEECH, 4, 4, {"cp": 2, "dispatch": "none", "encoder_first_in": 1}),
    "ring, four ranks": (SPEECH, 4, 4, {"cp": 4, "method": "ring", "dispatch": "none", "recompute": ALL}),
    "ring, whole weights": (SPEECH, 4, None, RING | {"dispatch": "llm"}),
    "ring, copies across sequences": (SPEECH, 4, 1, RING | {"dispatch": "none", "encoder_first_in": 2}),
    "ulysses, all dispatched": (SPEECH, 4, 4, ULYSSES | {"dispatch": "all"}),
    "ring, all dispatched, encoders first": (SPEECH | TIED, 4, 2, RING | {"dispatch": "all", "encoder_first_in": 1}),
    "ring, weights gathered once a step": (ZERO_2 | SPEECH, 4, 4, RING | {"dispatch": "none"}),
    "ring, frozen encoder": (FROZEN_VISION | SPEECH, 2, 2, RING | {"dispatch": "none"}),
    "ulysses, adapters": (ADAPTED, 2, 2, ULYSSES | {"dispatch": "none"}),
    "ring with tensor parallelism": (SPEECH, 4, 2, RING | {"tp": 2, "sp": True, "dispatch": "none", "recompute": ALL}),
    "ulysses with tensor parallelism, all dispatched": (SPEECH | TIED, 8, 4, ULYSSES | {"tp": 2, "dispatch": "all"}),
    "ulysses, deepstack": (DEEPSTACK, 2, 2, ULYSSES | {"dispatch": "none"}),
}


@pytest.mark.parametrize("case", [*WITH_CP, *mostly_long(MORE_WITH_CP, every=2)])
def test_sharded_ranks_that_share_sequences_compute_what_one_process_does(case: str) -> None:
    changes, num_ranks, shard, arguments = (WITH_CP | MORE_WITH_CP)[case]
    settings = recipe(**changes)
    assert_equals_one_process(settings, replicated(settings, num_ranks, shard, **arguments), texts_between=True)


FREEZE: dict[str, dict[str, Any]] = {
    "nothing": SPEECH,
    "encoders": FROZEN_VISION | {"model__audio": AUDIO | {"freeze": True}},
    "llm": SPEECH | {"model__llm__freeze": True},
}
# of three modalities: dispatch, node-wise, shard, what is frozen, mini-batches of encoders that run first
DispatchCell = tuple[DispatchMode, bool, int | None, str, int | None]
DISPATCH_MODES: tuple[DispatchMode, ...] = ("all", "llm", "none")


def _cells_of_most_pairs(number: int) -> list[DispatchCell]:
    """Return cells that together show the most pairs of values; of equal ones the first."""
    left = list(product(DISPATCH_MODES, (True, False), (1, 2, 4, None), FREEZE, (None, 1, 2)))
    pairs = {cell: set(combinations(enumerate(cell), 2)) for cell in left}
    seen: set[Any] = set()
    chosen = []
    for _ in range(number):
        chosen.append(max(left, key=lambda cell: len(pairs[cell] - seen)))
        left.remove(chosen[-1])
        seen |= pairs[chosen[-1]]
    assert seen == set().union(*pairs.values()), "each pair of values is shown"
    return chosen


@pytest.mark.slow  # 3 s each
@pytest.mark.parametrize("cell", _cells_of_most_pairs(14), ids=lambda cell: "-".join(map(str, cell)))
def test_three_modalities_compute_what_one_process_does(cell: DispatchCell) -> None:
    dispatch, node_wise, shard, frozen, encoder_first_in = cell
    settings = recipe(**FREEZE[frozen] | TWO_NODES | {"parallel__node_wise": node_wise})
    chosen = replicated(settings, 4, shard, dispatch=dispatch, encoder_first_in=encoder_first_in)
    assert_equals_one_process(settings, chosen, texts_between=True)


# name -> samples of a step, its images, its clips
UNEVEN = {"clips alone": (HEARD, 0, 4), "a giant sample": (LONG, 9, 4), "one clip": (range(4, 12), 5, 1)}


@pytest.mark.slow  # 2 s each
@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize(
    ("dispatch", "encoder_first_in", "exchange"),
    [
        ("all", None, {}),
        ("all", 1, {}),
        ("all", None, BY_ALL_GATHER),
        ("all", 2, BY_ALL_GATHER),
        ("llm", None, {}),
        ("none", 1, {}),
    ],
)
def test_phases_that_are_empty_on_some_ranks_or_on_all(
    dispatch: DispatchMode, encoder_first_in: int | None, exchange: dict[str, Any], uneven: str
) -> None:
    """Four ranks with two mini-batches each, of which some or all have no image, and most no clip."""
    samples, num_images, num_clips = UNEVEN[uneven]
    settings = recipe(**SPEECH | {"train__global_batch": 8} | exchange)
    meta = batch(0, samples, dict.fromkeys(("vision", "audio", "llm"), 4), dict.fromkeys(("vision", "audio", "llm"), 2))
    assert [len(meta.items[unit].sample) for unit in ("vision", "audio")] == [num_images, num_clips]
    chosen = replicated(settings, 4, 2, dispatch=dispatch, encoder_first_in=encoder_first_in)
    assert_equals_one_process(settings, chosen, samples)


def test_the_dispatched_steps_of_these_cases_move_items() -> None:
    """Else they would show nothing: items leave their sample's rank, and the fullest rank has fewer tokens."""
    fullest: dict[str, list[int]] = {"vision": [], "audio": []}
    dp = dict.fromkeys(("vision", "audio", "llm"), 4)
    modes: tuple[DispatchMode, ...] = ("llm", "all")
    for dispatch in modes:
        meta = batch(0, samples_of(0), dp, dict.fromkeys(dp, 2), dispatch)
        for unit, table in meta.items.items():
            is_away = meta.replica[table.sample] != table.replica
            assert is_away.any() == (dispatch == "all")
            fullest[unit].append(int(np.bincount(table.replica * 2 + table.index, table.tokens).max()))
    assert fullest["vision"][1] < fullest["vision"][0]
    assert fullest["audio"][1] <= fullest["audio"][0]


def test_node_wise_places_differ_and_keep_more_on_two_nodes() -> None:
    """Else the case with two nodes would show nothing."""
    dp = dict.fromkeys(("vision", "audio", "llm"), 4)
    from_other_node: list[int] = []
    for ranks_per_node in (4, 2):
        most = 0
        for step in range(NUM_STEPS):
            meta = batch(step, samples_of(step), dp, dict.fromkeys(dp, 2), "all", ranks_per_node)
            for table, index in product(meta.items.values(), range(2)):
                of_batch, home = table.index == index, meta.replica[table.sample]
                is_from_other = of_batch & (table.replica // 2 != home // 2)
                most += int(np.bincount(home[is_from_other], table.features[is_from_other]).max(initial=0))
        from_other_node.append(most)
    assert from_other_node[1] < from_other_node[0]


def _drawn(number: int) -> tuple[Recipe, Plan, bool]:
    """Draw a model, what of it trains, and how it is sharded; microbatches may have neither image nor clip."""
    choose = Random(number).choice
    encoders: dict[str, Any] = choose(({}, SPEECH, {"model__encoders": {"fine": FINE}}))
    num_ranks = choose((2, 4))
    llm_kind = choose([kind for kind in LLM_KINDS if kind != "m-rope" or "model__encoders" not in encoders])
    kinds = {"llm": LLM_KINDS[llm_kind], "vision": VISION_KINDS[choose(list(VISION_KINDS))]}
    of_kinds = {f"model__{unit}__{name}": value for unit, kind in kinds.items() for name, value in kind.items()}
    batch = {"train__global_batch": num_ranks * choose((1, 2)), "cluster__ranks_per_node": choose((1, 2, 4))}
    exchange = choose(({}, BY_ALL_GATHER))
    settings = recipe(**encoders, **of_kinds, **choose(list(FROZEN.values())), **batch, **exchange)
    shard = choose([size for size in (1, 2, 4, None) if size is None or size <= num_ranks])
    recompute, texts_between = choose(list(RECOMPUTED.values())), choose((False, True))
    dispatch = choose(("all", "llm", "none"))
    encoder_first_in = choose(
        (None, *(number for number in (1, 2) if batch["train__global_batch"] // num_ranks % number == 0))
    )
    tp = choose((1, 2)) if num_ranks == 4 and shard != 4 else 1
    sp = tp > 1 and choose((False, True))
    chosen = replicated(settings, num_ranks, shard, recompute, dispatch, encoder_first_in, tp=tp, sp=sp)
    return settings, chosen, texts_between


@pytest.mark.long  # 2 s each
@pytest.mark.parametrize("number", range(12))
def test_drawn_models_compute_sharded_what_one_process_does(number: int) -> None:
    assert_equals_one_process(*_drawn(number))


def _train_in_bf16(settings: Recipe, chosen: Plan) -> list[tuple[float, float]]:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, chosen, world)
    outcomes = [context.train(step_data(context, step), 0.01) for step in range(4)]
    return [(outcome.loss, outcome.grad_norm or 0.0) for outcome in outcomes]


@pytest.mark.slow  # 3 s
def test_bf16_trains_sharded_as_with_whole_weights() -> None:
    settings = recipe()
    whole_weights = plan(settings, vision=Mesh((), (0, 1), dp=2), llm=Mesh((), (0, 1), dp=2))
    plans = [whole_weights, replicated(settings, 2, 2), replicated(settings, 2, 1)]
    in_bf16 = [chosen.model_copy(update={"precision": "bf16"}) for chosen in plans]
    expected, *sharded = (np.array(run_ranks(2, _train_in_bf16, settings, chosen)) for chosen in in_bf16)
    for outcomes in sharded:
        np.testing.assert_allclose(outcomes, expected, rtol=1e-4)


def _after_a_restart(shard: str) -> list[str]:
    size, *zero = shard.split(" and ")
    return [f"parallel.shard={size}", *(f"parallel.{setting}" for setting in zero)]


@pytest.mark.slow  # 20 s each
@pytest.mark.parametrize("shard_after", ["all", "1", "all and zero=2"])
def test_a_killed_run_is_resumed_on_the_same_shards_and_on_others(
    shard_after: str, data: Path, unbroken_replicated: Path, tmp_path: Path
) -> None:
    """Bit for bit on the same shards; sums are rounded otherwise where each rank holds all."""
    chosen = load_plan(unbroken_replicated / PLAN_FILE)
    assert (chosen.shard, chosen.dispatch) == (2, "all")
    settings = (*REPLICATED, "train.validate_every=2")
    killed = request_for(data, tmp_path, *settings)
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(killed, killed, faults=FailAt(1, 3, "kill", action=Backward))
    resumed = request_for(data, tmp_path, *settings, *_after_a_restart(shard_after), resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    if shard_after == "all":
        assert_same_end(tmp_path, unbroken_replicated)
        return
    after = load_plan(tmp_path / PLAN_FILE)
    assert (after.shard, after.keeps_weights) == ((1, False) if shard_after == "1" else (2, True))
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (tmp_path, unbroken_replicated))
    assert losses == pytest.approx(expected, rel=1e-5)


PARTS = ("parallel.placement=replicated", "parallel.shard=all", "parallel.dispatch=all", "train.global_batch=8")
PAIRS = (*PARTS, "parallel.llm.tp=2", "cluster.ranks=4")


@pytest.fixture(scope="module")
def unbroken_pairs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two TP groups that share the shards of each place."""
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    request = request_for(data, run_dir, *PAIRS, "parallel.llm.sp=true", "parallel.vision.sp=true")
    assert run_all(*[request] * 4) == [""] * 4
    return run_dir


@pytest.mark.slow  # 30 s each
@pytest.mark.parametrize(
    ("after", "num_ranks"),
    [
        ((*PAIRS, "parallel.llm.sp=true", "parallel.vision.sp=true"), 4),
        ((*PARTS, "parallel.llm.tp=1", "cluster.ranks=4"), 4),
        ((*PARTS, "parallel.llm.tp=2", "cluster.ranks=2"), 2),
        ((*PARTS, "parallel.llm={tp: 1, cp: 2}", "cluster.ranks=4"), 4),
    ],
    ids=["same", "without tensor parallelism", "on one TP group", "with shared sequences"],
)
def test_a_killed_run_of_parts_of_units_is_resumed(
    after: tuple[str, ...], num_ranks: int, data: Path, unbroken_pairs: Path, tmp_path: Path
) -> None:
    """Bit for bit on the same ranks; sums are rounded otherwise where TP groups or their number are others."""
    chosen = load_plan(unbroken_pairs / PLAN_FILE)
    assert [(unit.tp, unit.sp, unit.shard) for unit in chosen.units.values()] == [(2, True, 2)] * 2
    killed = request_for(data, tmp_path, *PAIRS, "parallel.llm.sp=true", "parallel.vision.sp=true")
    with pytest.raises(RanksFailed, match="rank 3: died without a word"):
        run_all(*[killed] * 4, faults=FailAt(3, 3, "kill", action=Backward))
    resumed = request_for(data, tmp_path, *after, "train.validate_every=3", resume=True)
    assert run_all(*[resumed] * num_ranks) == [""] * num_ranks
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (tmp_path, unbroken_pairs))
    assert losses == pytest.approx(expected, rel=1e-5)
    if num_ranks == 4 and "parallel.llm.tp=2" in after:
        assert_same_end(tmp_path, unbroken_pairs)


@pytest.mark.slow  # 20 s, shared with other tests
def test_a_run_logs_and_reports_its_dispatches(unbroken_replicated: Path) -> None:
    steps = read_metrics(unbroken_replicated)
    for step in steps:
        assert 0 < step["dispatch"]["seconds"] <= step["time_s"]["communication"] + 1e-9
        vision, llm = (step["dispatch"]["phases"][unit] for unit in ("vision", "llm"))
        assert llm["mean"] == step["tokens"] / 2
        assert vision["mean"] <= vision["max_after"] <= vision["max_before"]
    text = CliRunner().invoke(app, ["report", str(unbroken_replicated)]).output
    assert "Load of each phase" in text
    assert [line for line in text.splitlines() if "vision" in line and "measured" in line]


def _other_policies(pad: str) -> dict[str, str]:
    """Return balance policies by which no unit of the run is computed."""
    return {"vision": "padded", "llm": "packed" if pad == "true" else "padded"}


@pytest.mark.slow  # 30 s
@pytest.mark.parametrize("pad", ["false", "true"])
def test_samples_that_are_dispatched_change_no_loss(pad: str, data: Path, tmp_path: Path) -> None:
    """Random groups are uneven, so ranks exchange samples; the fullest rank has fewer tokens for it."""
    settings = ("data.grouping=random", f"data.pad={pad}", "train.steps=3", "train.global_batch=8", *REPLICATED)
    runs = {}
    rigid = [f"parallel.{unit}.balance_policy={policy}" for unit, policy in _other_policies(pad).items()]
    for dispatch, policies in {"none": [], "all": [], "all by other policies": rigid}.items():
        mode = f"parallel.dispatch={dispatch.split()[0]}"
        request = request_for(data, tmp_path / dispatch, *settings, mode, *policies)
        assert run_all(request, request) == ["", ""]
        runs[dispatch] = read_metrics(tmp_path / dispatch)
    for key in ("loss", "grad_norm", "tokens", "samples"):
        values = {dispatch: [step[key] for step in steps] for dispatch, steps in runs.items()}
        assert values["all"] == pytest.approx(values["none"], rel=1e-5), key
        assert values["all by other policies"] == pytest.approx(values["none"], rel=1e-5), key
    fullest = {
        dispatch: sum(step["dispatch"]["phases"]["llm"]["max_after"] for step in steps)
        for dispatch, steps in runs.items()
    }
    assert fullest["all"] < fullest["none"] or pad == "true"  # phases count no padding


def _unified(settings: Recipe) -> Plan:
    return plan(settings, vision=Mesh((), (0,)), llm=Mesh((2,), (0, 1)))


def _keeping_weights(chosen: Plan) -> Plan:
    """Return the plan with weights that stay gathered through a step (ZeRO-2)."""
    units = {name: unit.model_copy(update={"keeps_weights": True}) for name, unit in chosen.units.items()}
    return chosen.model_copy(update={"units": units})


def _go_back(settings: Recipe, chosen: Plan, folder: Path) -> tuple[float, float, float]:
    """Return a loss, the same after the weights of before came back in the living process, and of a validation."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, chosen, world)
    context.train(step_data(context, 0), 0.1)
    save(folder, take_snapshot(SavedRank.of(context), 1, {"facts": {}}), keep=1, ranks=checkpoint_ranks(world))
    validated = context.validate(step_data(context, 1)).loss
    loss = context.train(step_data(context, 1), 0.1).loss
    context.validate(step_data(context, 1))  # leaves gathered weights behind
    restore_checkpoint(folder, context, refuse)
    return loss, context.train(step_data(context, 1), 0.1).loss, validated


@pytest.mark.slow  # 3 s
def test_kept_weights_are_gathered_anew_once_the_shards_change(tmp_path: Path) -> None:
    settings = recipe(train__freeze=("vision.layers.0.*",))
    ranks = run_ranks(2, _go_back, settings, _keeping_weights(replicated(settings, 2, 2)), tmp_path)
    loss, again, validated = (sum(rank[i] for rank in ranks) for i in range(3))
    assert again == loss == pytest.approx(validated, rel=1e-6)


class _CountedGathers(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the all-gathers of FSDP."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "allgather_base" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def _gathers_by_step(settings: Recipe, chosen: Plan) -> list[int]:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, chosen, world)
    numbers = []
    for step in range(2):
        data = step_data(context, step)
        with _CountedGathers() as gathers:
            context.train(data, 0.1)
        numbers.append(gathers.number)
    return numbers


def test_kept_weights_are_gathered_once_a_step() -> None:
    """Of two mini-batches: layer by layer in the first forward, and not in the others, nor in a backward."""
    settings = recipe(train__global_batch=4)
    sharded = replicated(settings, 2, 2)
    num_layers = sum(len(range(*unit.stages[0].layers)) for unit in sharded.units.values())
    for numbers in run_ranks(2, _gathers_by_step, settings, _keeping_weights(sharded)):
        assert numbers == [num_layers] * 2
    for numbers in run_ranks(2, _gathers_by_step, settings, sharded):
        assert min(numbers) > 3 * num_layers


def _unified_pairs(settings: Recipe) -> Plan:
    """Return a plan of two pipeline ranks, each of two tensor-parallel ones."""
    return plan(settings, vision=Mesh((), (0, 1), tp=2), llm=Mesh((2,), (0, 1, 2, 3), tp=2))


def _held(context: RankContext) -> list[NamedShard]:
    return [copy(piece) for unit in context.optimizer.units.values() for piece in unit.shards()]


def change_plan(settings: Recipe, first: Plan, second: Plan, folder: Path) -> tuple[float, float, list[NamedShard]]:
    """Save after a step of the first plan and go on by both; return the losses, and what was saved."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    before = build_rank_context(settings, first, world)
    before.train(step_data(before, 0), 0.1)
    snapshot = take_snapshot(SavedRank.of(before), 1, {"facts": {}})
    save(folder, snapshot, keep=1, ranks=checkpoint_ranks(world))
    saved, loss = _held(before), before.train(step_data(before, 1), 0.1).loss
    after = build_rank_context(settings, second, world)
    restore_checkpoint(folder, after, refuse)
    return loss, after.train(step_data(after, 1), 0.1).loss, saved


def _restore(settings: Recipe, chosen: Plan, folder: Path) -> list[NamedShard]:
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    context = build_rank_context(settings, chosen, world)
    restore_checkpoint(folder, context, refuse)
    return _held(context)


@pytest.mark.slow  # 3 s each
@pytest.mark.parametrize(
    "change",
    [
        *("to replicated", "from replicated", "another shard", "to whole weights"),
        *("to kept weights", "from kept weights", "kept weights in two copies"),
        *("to parts of units", "from parts of units", "parts of units to another shard"),
        *("parts of units to whole weights", "parts of units to a pipeline"),
    ],
)
def test_a_checkpoint_goes_over_to_another_placement_or_shard(change: str, tmp_path: Path) -> None:
    settings = recipe(model__llm__tie_embeddings=True, train__freeze=("vision.layers.0.*",))
    whole_copy, two_copies = replicated(settings, 2, 2), replicated(settings, 2, 1)
    kept_copy, two_kept_copies = (_keeping_weights(chosen) for chosen in (whole_copy, two_copies))
    on_four, parts = replicated(settings, 4, 4), replicated(settings, 4, 2, tp=2, sp=True)
    first, second = {
        "to kept weights": (_unified(settings), kept_copy),
        "from kept weights": (kept_copy, _unified(settings)),
        "kept weights in two copies": (kept_copy, two_kept_copies),
        "to parts of units": (on_four, parts),
        "from parts of units": (parts, on_four),
        "parts of units to another shard": (parts, replicated(settings, 4, 1, tp=2)),
        "parts of units to whole weights": (parts, replicated(settings, 4, None, dispatch="all", tp=2)),
        "parts of units to a pipeline": (parts, _unified_pairs(settings)),
        "to replicated": (_unified(settings), whole_copy),
        "from replicated": (whole_copy, _unified(settings)),
        "another shard": (whole_copy, two_copies),
        "to whole weights": (whole_copy, replicated(settings, 2, None, dispatch="all")),
    }[change]
    ranks = run_ranks(first.world_size, change_plan, settings, first, second, tmp_path)
    losses, next_losses = (sum(rank[i] for rank in ranks) for i in (0, 1))
    assert next_losses == pytest.approx(losses, rel=1e-6)
    saved = whole([piece for rank in ranks for piece in rank[2]])
    restored = whole(
        [piece for of_rank in run_ranks(second.world_size, _restore, settings, second, tmp_path) for piece in of_rank]
    )
    assert saved.keys() == restored.keys()
    assert [name for name in saved if not torch.equal(saved[name], restored[name])] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 2, "dp": 1, "shard": 1}, "a unit with cp above 1 has a method and a split"),
        ({"pp": 2, "dp": 1, "shard": 1}, "a unit that is sharded, or dispatches, has pp 1 and vpp 1"),
        (
            {"cp": 2, "cp_method": "ring", "cp_split": "auto", "dp": 2, "ranks": (0, 1, 2, 3), "shard": 3},
            "shard is 3, which does not divide dp x cp 4",
        ),
        ({"dp": 4, "ranks": (0, 1, 2, 3), "shard": 3}, "shard is 3, which does not divide dp 4; use a divisor of it"),
        ({"ranks": (1, 0), "shard": 2}, "those of a sharded unit ascend"),
    ],
)
def test_units_that_cannot_be_sharded_are_rejected(changes: dict[str, Any], message: str) -> None:
    settings = recipe()
    unit = replicated(settings, 2, 2).units["llm"].model_dump()
    with pytest.raises(ValueError, match=message):
        UnitPlan.model_validate(unit | changes)


def test_a_plan_of_another_placement_has_no_shards() -> None:
    chosen = replicated(recipe(), 2, 2).model_dump()
    with pytest.raises(ValueError, match="placement is unified, and shard is"):
        Plan.model_validate(chosen | {"placement": "unified"})


def test_what_is_dispatched_is_stated_of_all_sharded_units_alike() -> None:
    chosen = replicated(recipe(), 2, 2, dispatch="all")
    assert chosen.dispatch == "all"
    whole = chosen.units["llm"].model_dump() | {"shard": None}
    assert UnitPlan.model_validate(whole).is_replicated
    assert UnitPlan.model_validate(whole | {"tp": 2, "dp": 1}).is_replicated
    llm = chosen.units["llm"].model_copy(update={"dispatch": "llm"})
    with pytest.raises(ValueError, match="the same `ranks`, `tp`, `shard`, `keeps_weights`, `dispatch` and `exchange`"):
        Plan.model_validate(chosen.model_dump() | {"units": chosen.model_dump()["units"] | {"llm": llm.model_dump()}})


def _forwards_of_the_encoder(plans: dict[str, tuple[Recipe, Plan]]) -> dict[str, list[bool]]:
    """Return of each forward of the encoder's second layer in a step whether autograd kept activations of it."""
    world = World(torch.distributed.get_rank(), torch.distributed.get_world_size(), torch.device("cpu"))
    kept: dict[str, list[bool]] = {}
    for name, (settings, chosen) in plans.items():
        context = build_rank_context(settings, chosen, world)
        [stage] = context.units["vision"].stages.values()
        record = kept.setdefault(name, [])
        stage.layers["1"].register_forward_hook(partial(_record_whether_kept, record))
        context.train(step_data(context, 0), 0.1)
    return kept


def _record_whether_kept(record: list[bool], layer: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
    record.append(output.requires_grad)


def test_an_encoder_that_runs_first_runs_again_if_it_trains() -> None:
    training, frozen = recipe(), recipe(**FROZEN_VISION)
    plans = {
        "1f1b": (training, replicated(training, 1, 1)),
        "first": (training, replicated(training, 1, 1, encoder_first_in=2)),
        "first, frozen": (frozen, replicated(frozen, 1, 1, encoder_first_in=2)),
    }
    [kept] = run_ranks(1, _forwards_of_the_encoder, plans)
    num_llm = plans["1f1b"][1].schedule.num_microbatches["llm"]
    assert kept == {"1f1b": [True] * num_llm, "first": [False, False, True, True], "first, frozen": [False, False]}


def test_encoders_run_first_in_replicated_alone() -> None:
    chosen = replicated(recipe(), 2, 2, encoder_first_in=1).model_dump()
    assert Plan.model_validate(chosen).schedule.kind == "encoder_first"
    with pytest.raises(ValueError, match="`replicated` runs its units by `1f1b` or `encoder_first`"):
        Plan.model_validate(chosen | {"schedule": chosen["schedule"] | {"kind": "coarse"}})
    unified = _unified(recipe()).model_dump()
    with pytest.raises(ValueError, match=r"schedule.kind is encoder_first with placement unified; allowed: replicated"):
        Plan.model_validate(unified | {"schedule": unified["schedule"] | {"kind": "encoder_first"}})
