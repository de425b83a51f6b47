"""Runs that lose ranks, and the memory of their nodes with them, and go on from the copies of their peers."""

import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.program import Action
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from tests.distributed import RanksFailed, fork_ranks
from tests.flow.runs import SHARDED, assert_same_end, launch, request_for, run_all
from tests.flow.test_elastic import _launch_printing
from tests.waiting import poll

LATE_CHECKPOINTS = "train.checkpoint.every=100"
COPIES = "train.peer_copies.every=1"


class NodesAreLost(FaultPoints):
    """Gives each rank a node of its own, and kills some in one step, together with the memory of their nodes."""

    def __init__(self, ranks: set[int], step: int, folder: Path) -> None:
        self.ranks, self.step, self.folder = ranks, step, folder

    def node_memory(self, rank: int, folder: Path) -> Path:
        """See `FaultPoints`."""
        return self.folder / f"node-{rank}"

    def start(self, rank: int) -> None:
        """See `FaultPoints`."""
        self.rank = rank

    def before_action(self, step: int, action: Action) -> None:
        """See `FaultPoints`."""
        marks = [self.folder / f"lost-{rank}" for rank in self.ranks]
        mark = self.folder / f"lost-{self.rank}"
        if self.rank not in self.ranks or step != self.step or mark.exists():
            return
        shutil.rmtree(self.folder / f"node-{self.rank}")
        mark.touch()
        poll(lambda: all(other.exists() for other in marks))  # the launcher would end the others before they come here
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def unbroken_four(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "four"
    assert launch(request_for(data, run_dir, LATE_CHECKPOINTS, ranks=4)) == (0, "")
    return run_dir


@pytest.mark.slow
def test_two_nodes_that_are_lost_at_once_cost_at_most_one_step(data: Path, unbroken_four: Path, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    lost = NodesAreLost({1, 2}, 4, nodes)  # ranks 0 and 1 keep each other's copies, and so do 2 and 3
    request = request_for(data, tmp_path / "run", LATE_CHECKPOINTS, COPIES, ranks=4, max_restarts=1)
    output = tmp_path / "text"
    [outcome] = fork_ranks(1, _launch_printing, replace(request, faults=lost), output)
    assert outcome == (0, "")
    text = " ".join(output.read_text(encoding="utf-8").split())
    steps = [int(step) for step in re.findall(r"resuming after step (\d+) from", text)]
    assert steps in ([3], [4]), "four steps were finished, and nothing was on disk"
    assert_same_end(tmp_path / "run", unbroken_four)
    assert [path for path in nodes.rglob("*") if path.suffix] == [], "copies are removed at the end"


@pytest.mark.slow
def test_nodes_that_keep_each_others_copies_are_lost_with_them(data: Path, unbroken_four: Path, tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    request = request_for(data, tmp_path / "run", LATE_CHECKPOINTS, COPIES, ranks=4, max_restarts=1)
    output = tmp_path / "text"
    [outcome] = fork_ranks(1, _launch_printing, replace(request, faults=NodesAreLost({2, 3}, 4, nodes)), output)
    assert outcome == (0, "")
    text = " ".join(output.read_text(encoding="utf-8").split())
    assert "holds no checkpoint yet: starting from the first step" in text
    assert_same_end(tmp_path / "run", unbroken_four)


class OtherNodes(FaultPoints):
    """Starts ranks on nodes of another run, by their numbers there."""

    def __init__(self, nodes: Sequence[int], folder: Path) -> None:
        self.nodes, self.folder = nodes, folder

    def node_memory(self, rank: int, folder: Path) -> Path:
        """See `FaultPoints`."""
        return self.folder / f"node-{self.nodes[rank]}"


@pytest.mark.slow
@pytest.mark.parametrize("placement", [("parallel.placement=disaggregated",), SHARDED])
def test_nodes_that_are_left_go_on_from_their_copies_with_another_plan(
    data: Path, unbroken_four: Path, tmp_path: Path, placement: tuple[str, ...]
) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    request = request_for(data, tmp_path / "run", LATE_CHECKPOINTS, COPIES, *placement, ranks=4, elastic=True)
    with pytest.raises(RanksFailed, match="died without a word"):
        run_all(*[request] * 4, faults=NodesAreLost({1, 2}, 4, nodes))
    resumed = replace(request, resume=True)
    assert run_all(resumed, resumed, faults=OtherNodes((3, 0), nodes)) == ["", ""]
    steps = read_metrics(tmp_path / "run")
    ranks = [step["ranks"] for step in steps]
    assert ranks in ([4] * 4 + [2] * 2, [4] * 3 + [2] * 3)
    expected = [step["loss"] for step in read_metrics(unbroken_four)]
    assert [step["loss"] for step in steps] == pytest.approx(expected, rel=1e-5)
