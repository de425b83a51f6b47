"""Who keeps whose copies, when copies are taken, and what happens where there is no room for them."""

import errno
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mmtrain.checkpoint import memory_copies
from mmtrain.errors import UserError
from mmtrain.models.optim.parameter_specs import NamedShard
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.runtime.execution.activity import Activity
from mmtrain.runtime.execution.checkpointing import SavedRank
from mmtrain.runtime.execution.peer_copies import NodeMemory, PeerCopies, find_newest_copy
from mmtrain.runtime.training.hooks.peer_copying import PeerCopying
from mmtrain.runtime.training.step_hook import StepContext
from mmtrain.runtime.world import World

ALONE = World(0, 1, torch.device("cpu"))
COURSE = "course"


@pytest.mark.parametrize("num_nodes", range(1, 8))
def test_peers_are_on_another_node_and_few_pairs_of_nodes_hold_both_copies(num_nodes: int) -> None:
    nodes = tuple(node for node in range(num_nodes) for _ in range(2))
    memory = NodeMemory(Path(), nodes)
    if num_nodes == 1:
        assert memory.peers == [None, None]
        return
    peers = cast(list[int], memory.peers)
    assert all(nodes[peer] != nodes[rank] for rank, peer in enumerate(peers))
    assert sorted(peers) == list(range(len(nodes))), "each rank keeps one copy beside its own"
    assert [rank for keeper in range(len(nodes)) for rank in memory.kept_by(keeper)] == sorted(
        range(len(nodes)), key=lambda rank: peers[rank]
    )
    fatal = sum(
        any({nodes[rank], nodes[peer]} == {first, second} for rank, peer in enumerate(peers))
        for first, second in combinations(range(num_nodes), 2)
    )
    assert fatal == (num_nodes // 2 if num_nodes % 2 == 0 else (num_nodes - 3) // 2 + 3), "pairs, and a ring of three"


def test_ranks_of_uneven_nodes_share_what_they_keep() -> None:
    memory = NodeMemory(Path(), (0, 0, 0, 1))
    assert memory.peers == [3, 3, 3, 0]
    assert memory.kept_by(3) == [0, 1, 2]


def saved_rank(weight: torch.Tensor) -> SavedRank:
    spec = ParamSpec("llm.weight", tuple(weight.shape), None)
    piece = NamedShard("llm.weight", spec, 0, 1, (0, weight.numel()), weight)
    return SavedRank(ALONE, Activity(), 1, lambda: [piece], lambda: 3, lambda step: cast(Any, None))


def test_the_newest_complete_copy_is_found_and_the_one_before_stays_meanwhile(tmp_path: Path) -> None:
    weight = torch.zeros(4)
    memory = NodeMemory.join(ALONE, tmp_path / "run")
    copies = PeerCopies(memory, saved_rank(weight), dict, COURSE)
    assert find_newest_copy(ALONE, memory, COURSE) is None
    steps = []
    for step in (1, 2, 3):
        weight.fill_(step)
        copies.start(step)
        copies.finish()
        found = find_newest_copy(ALONE, memory, COURSE)
        assert found is not None
        steps.append((found.step, found.slot))
    assert steps == [(1, 0), (2, 1), (3, 0)]
    memory_copies.invalidate(memory_copies.slot_folder(memory.root, 0), 0)  # as where the fourth one is cut off
    found = find_newest_copy(ALONE, memory, COURSE)
    assert found is not None
    assert found.step == 2
    assert find_newest_copy(ALONE, memory, "another course") is None
    resumed = PeerCopies(memory, saved_rank(weight), dict, COURSE, kept_slot=found.slot)
    assert find_newest_copy(ALONE, memory, COURSE) == found, "it stays until the next one is complete"
    resumed.start(3)
    resumed.finish()
    newest = find_newest_copy(ALONE, memory, COURSE)
    assert newest is not None
    assert (newest.step, newest.slot) == (3, 0)
    resumed.remove()
    assert not memory.root.exists()


def test_a_node_without_room_is_named_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> torch.Tensor:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory_copies, "map_file", full)
    memory = NodeMemory.join(ALONE, tmp_path / "run")
    with pytest.raises(UserError, match=r"train\.peer_copies\.folder: .*no room for the copies of rank 0.*--shm-size"):
        PeerCopies(memory, saved_rank(torch.zeros(4)), dict, COURSE)


def test_a_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is a link"):
        NodeMemory.join(ALONE, tmp_path / "run")


class Copies:
    """Copies that note their steps, each of which takes `duration` steps."""

    def __init__(self, duration: int) -> None:
        self.duration, self.steps, self.is_removed = duration, list[int](), False
        self.error: Exception | None = None

    def start(self, next_step: int) -> None:
        self.steps.append(next_step)

    def finish(self, limit_s: float | None = None) -> None:
        """Wait for nothing."""

    def remove(self) -> None:
        self.is_removed = True

    def are_complete(self, step: int) -> bool:
        return not self.steps or step - self.steps[-1] >= self.duration


@pytest.mark.parametrize(
    ("every", "duration", "expected"),
    [(1, 1, [1, 2, 3, 4, 5, 6, 7]), (3, 1, [3, 6]), (2, 3, [2, 5]), (1, 3, [1, 4, 7]), (9, 1, [])],
)
def test_a_copy_that_is_due_while_one_is_under_way_follows_it(every: int, duration: int, expected: list[int]) -> None:
    copies = Copies(duration)
    notes: list[str] = []
    hook = PeerCopying(cast(Any, copies), every, notes.append)
    for step in range(8):
        ctx = StepContext(step, 8)
        ctx.reduction = cast(
            Any, SimpleNamespace(stop_requested=False, no_rank_copies=copies.are_complete(ctx.step_number))
        )
        before = list(copies.steps)
        takes_copy = hook.takes_copy(ctx)
        hook.after_step(ctx)
        assert takes_copy == (copies.steps != before)
    assert copies.steps == expected
    assert copies.is_removed, "nothing stays in memory of a run that has ended"
    assert notes == []


def test_a_copy_that_fails_is_told_once() -> None:
    copies = Copies(1)
    notes: list[str] = []
    hook = PeerCopying(cast(Any, copies), 1, notes.append)
    copies.error = OSError(errno.ENOSPC, "No space left on device")
    for step in range(3):
        ctx = StepContext(step, 8)
        ctx.reduction = cast(Any, SimpleNamespace(stop_requested=False, no_rank_copies=False))
        hook.after_step(ctx)
    [note] = notes
    assert note.startswith("no further copies in memory are made")
    assert copies.steps == []
