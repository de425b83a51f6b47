"""Whole runs whose plan, chosen by the search, lets ranks share sequences: the losses are those of any other plan."""

from pathlib import Path

import pytest

from mmtrain.plan import load_plan
from mmtrain.program import Backward
from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import PLAN_FILE
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, request_for, run_all

SHARED = ("parallel.placement=unified", "parallel.llm.cp=2", "parallel.llm.cp_split=even", "cluster.ranks=2")
WHOLE = ("parallel.placement=unified", "parallel.llm.cp=1", "cluster.ranks=2")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_a_run_that_shares_sequences_goes_on_without_sharing(
    method: str, data: Path, unbroken: Path, tmp_path: Path
) -> None:
    """The search proposes the plan, a rank is killed behind the first checkpoint, and another plan continues."""
    shared = request_for(data, tmp_path, *SHARED, f"parallel.llm.cp_method={method}")
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(shared, shared, faults=FailAt(1, 3, "kill", action=Backward))
    llm = load_plan(tmp_path / PLAN_FILE).units["llm"]
    assert (llm.cp, llm.cp_method, llm.cp_split) == (2, method, "even")
    resumed = request_for(data, tmp_path, *WHOLE, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert load_plan(tmp_path / PLAN_FILE).units["llm"].cp == 1
    losses, expected = ([step["loss"] for step in read_metrics(run)] for run in (tmp_path, unbroken))
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(expected, rel=1e-5)
