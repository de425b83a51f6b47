"""Runs on several sources: the loss of each, and the same steps whatever the ranks and starts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.program import Backward
from mmtrain.report import read_metrics
from mmtrain.report.logged_totals import sum_sources
from tests.distributed import RanksFailed
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, assert_same_end, request_for, run_all

pytestmark = pytest.mark.slow


def mixing(data: Path) -> str:
    """Return the setting of two sources whose shares change in the middle of the run."""
    return (
        f"data.sources=[{{path: {data}/train.json, share: {{0: 0.8, 3: 0.3}}}}, "
        f"{{path: {data}/heldout.json, share: {{0: 0.2, 3: 0.7}}}}]"
    )


def test_a_mixture_is_reported_by_source_and_resumes_exactly(data: Path, tmp_path: Path) -> None:
    whole, broken, alone = tmp_path / "whole", tmp_path / "broken", tmp_path / "alone"
    settings = (mixing(data), "parallel.placement=unified")
    request = request_for(data, whole, *settings)
    assert run_all(request, request) == ["", ""]
    steps = read_metrics(whole)
    assert len(steps) == NUM_STEPS
    for step in steps:
        sources = step["sources"]
        assert set(sources) == {"train.json", "heldout.json"}
        assert sum(source["tokens"] for source in sources.values()) == step["tokens"]
        assert sum(source["samples"] for source in sources.values()) == step["samples"]
        losses = [source["loss"] for source in sources.values() if source["loss"] is not None]
        assert min(losses) <= step["loss"] <= max(losses)
    early, late = sum_sources(steps[:3]), sum_sources(steps[3:])
    assert early[0].token_share > 0.6 > 0.4 > late[0].token_share

    killed = replace(request, run_dir=broken)
    with pytest.raises(RanksFailed, match="rank 1: died without a word"):
        run_all(killed, killed, faults=FailAt(1, 4, "kill", action=Backward))
    shutil.copytree(broken, alone)
    resumed = replace(killed, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_end(broken, whole)
    assert [s["sources"] for s in read_metrics(broken)] == [s["sources"] for s in steps]

    assert run_all(replace(resumed, run_dir=alone, ranks=1, elastic=True)) == [""]
    assert read_metrics(alone)[-1]["ranks"] == 1
    for step, expected in zip(read_metrics(alone), steps, strict=True):
        for name, values in expected["sources"].items():
            assert step["sources"][name] == pytest.approx(values, rel=1e-3), "the same samples on one rank"

    other_shares = mixing(data).replace("0.3}", "0.4}").replace("0.7}", "0.6}")
    changed = request_for(data, broken, other_shares, *settings[1:], resume=True)
    [message, _] = run_all(changed, changed)
    assert "data.shares: [{0: 0.8, 3: 0.3}, {0: 0.2, 3: 0.7}] then, [{0: 0.8, 3: 0.4}" in message


def test_sources_of_one_rank_are_those_of_two(data: Path, tmp_path: Path) -> None:
    """Under tensor parallelism the ranks see one loss, and under a pipeline one of them sees none."""
    reported = []
    for name, num_ranks, changes in (
        ("one", 1, ("parallel.placement=unified", "parallel.llm.tp=1", "parallel.llm.pp=1")),
        ("tp", 2, ("parallel.placement=unified", "parallel.llm.tp=2", "parallel.vision.tp=2")),
        ("pp", 2, ("parallel.placement=unified", "parallel.llm.pp=2")),
    ):
        request = request_for(data, tmp_path / name, mixing(data), *changes, "train.steps=2")
        assert run_all(*[request] * num_ranks) == [""] * num_ranks
        reported.append([step["sources"] for step in read_metrics(tmp_path / name)])
    one = reported[0]
    for other in reported[1:]:
        for step, expected in zip(other, one, strict=True):
            for source, values in expected.items():
                assert step[source] == pytest.approx(values, rel=1e-3)
