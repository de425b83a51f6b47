"""Plans on a gloo that behaves like NCCL: all of them train there, and the order of connecting is what they need."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, device, full

from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.planning import Plan
from mmtrain.program import Action, Recv, Send
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution import rank_context
from mmtrain.runtime.execution.process_groups import ProcessGroups, channel_of
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from tests.distributed import RanksFailed, run_ranks
from tests.flow.cases import Mesh, plan, recipe
from tests.flow.equality import assert_equals_one_process, train_steps
from tests.flow.nccl_like import like_nccl
from tests.flow.test_delta_nets import SHARED as DELTA_NETS
from tests.flow.test_master import ALL_CASES, ORDERS, kind_of
from tests.tiers import mostly_long

TIMEOUT_S = 90.0
HANG_S = 4.0  # of a rank that waits for a communicator, where a test expects that


def _settings_and_plan(case: str) -> tuple[Recipe, Plan]:
    changes, meshes = ALL_CASES[case]
    settings = recipe(**changes)
    return settings, plan(settings, kind_of(case), ORDERS.get(case), **meshes)


def train_eagerly(settings: Recipe, wanted: Plan, texts: bool) -> tuple[list[tuple[float, float]], list[NamedShard]]:
    with like_nccl(eager=True, timeout_s=TIMEOUT_S):
        return train_steps(settings, wanted, texts)


def train_lazily(settings: Recipe, wanted: Plan, texts: bool) -> tuple[list[tuple[float, float]], list[NamedShard]]:
    with like_nccl(eager=False, timeout_s=TIMEOUT_S):
        return train_steps(settings, wanted, texts)


@pytest.mark.parametrize("case", mostly_long(ALL_CASES, every=8))
def test_any_plan_trains_on_what_behaves_like_nccl(case: str) -> None:
    settings, wanted = _settings_and_plan(case)
    assert_equals_one_process(settings, wanted, timeout=TIMEOUT_S, train=train_eagerly)


# Sharded passes are collectives of all ranks, and features go between them by messages of those that share sequences.
SHARDED: dict[str, tuple[int, dict[str, Mesh]]] = {
    "cp": (2, {"vision": Mesh((), (0, 1, 2, 3), dp=4), "llm": Mesh((), (0, 1, 2, 3), dp=2, cp=2, split="even")}),
    "tp and cp": (
        2,
        {
            "vision": Mesh((), (0, 1, 2, 3), dp=2, tp=2),
            "llm": Mesh((), (0, 1, 2, 3), cp=2, tp=2, sp=True, split="even"),
        },
    ),
}


@pytest.mark.slow
def test_delta_nets_whose_ranks_share_sequences_train_on_what_behaves_like_nccl() -> None:
    changes, meshes = DELTA_NETS["cp2 tp2 with slices of tokens, pp2, recomputed"]
    settings = recipe(**changes)
    assert_equals_one_process(settings, plan(settings, **meshes), timeout=TIMEOUT_S, train=train_eagerly)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARDED)
def test_sharded_ranks_that_share_sequences_train_on_what_behaves_like_nccl(case: str) -> None:
    (shard, meshes), settings = SHARDED[case], recipe()
    wanted = plan(settings, shard=shard, dispatch="none", **meshes)
    assert_equals_one_process(settings, wanted, timeout=TIMEOUT_S, train=train_eagerly)


# Ranks enter their channels in different orders: the first five as the master test has them, the others with one
# microbatch a replica, where nearly every plan does.
_OF_THE_MASTER_TEST = (
    "merged over two replicas, dp 1:2",
    "one encoder microbatch for all of an llm of pp2 vpp2",
    "disaggregated 2:4, two replica groups",
    "three units in one pipeline",
    "colocated, encoders merged and split",
)
ENTER_IN_DIFFERENT_ORDERS: dict[str, tuple[dict[str, Any], dict[str, Mesh]]] = {
    **{case: ALL_CASES[case] for case in _OF_THE_MASTER_TEST},
    "one microbatch, pp2": (
        {"train__global_batch": 1},
        {"vision": Mesh((), (0,)), "llm": Mesh((2,), (0, 1))},
    ),
    "one microbatch, disaggregated": (
        {"train__global_batch": 1},
        {"vision": Mesh((), (0,)), "llm": Mesh((), (1,))},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENTER_IN_DIFFERENT_ORDERS)
def test_ranks_that_enter_channels_in_the_order_of_their_programs_hang(case: str) -> None:
    changes, meshes = ENTER_IN_DIFFERENT_ORDERS[case]
    settings = recipe(**changes)
    wanted = plan(settings, kind_of(case), **meshes)
    with pytest.raises(RanksFailed, match=r"waits for a communicator of ranks \[\d, \d\]"):
        run_ranks(wanted.world_size, _enter_in_the_order_of_the_program, settings, wanted, timeout=TIMEOUT_S)
    assert_equals_one_process(settings, wanted, timeout=TIMEOUT_S, train=train_lazily)


def _enter_in_the_order_of_the_program(settings: Recipe, wanted: Plan) -> None:
    """Build the job with groups that are not connected, and enter each channel where the program first does."""
    world = World(dist.get_rank(), dist.get_world_size(), device("cpu"))
    probe = rank_context.probe_channels
    with like_nccl(eager=False, timeout_s=HANG_S):
        rank_context.probe_channels = lambda groups, world, activity: None
        try:
            context = build_rank_context(settings, wanted, world)
        finally:
            rank_context.probe_channels = probe
        _enter(context.program.for_rank(world.rank), context.transport.groups, world.rank)


def _enter(actions: Iterable[Action], groups: ProcessGroups, rank: int) -> None:
    numbers: dict[Any, Tensor] = {}
    for action in actions:
        if not isinstance(action, Send | Recv):
            continue
        channel = channel_of(action, rank)
        if channel not in numbers:
            numbers[channel] = full((1,), float(rank))
            post = dist.isend if isinstance(action, Send) else dist.irecv
            post(numbers[channel], action.peer, group=groups.channels[channel])
