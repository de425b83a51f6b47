"""Padding costs time and memory, and changes neither losses nor gradients."""

from pathlib import Path
from typing import Any

import pytest

from mmtrain.balance import BatchMeta
from mmtrain.data.stream import group_stream
from mmtrain.report import read_metrics
from mmtrain.runtime.execution.fault_points import FaultPoints
from mmtrain.runtime.resilience.launch import free_port
from tests.distributed import fork_ranks
from tests.flow.runs import request_for, run_all, run_one_rank

SETTINGS = ("data.grouping=random", "data.pad=true", "train.steps=3", "train.global_batch=8")
TOGETHER = ("parallel.placement=unified", "parallel.llm.dp=2")
PIPELINE = ("parallel.placement=unified", "parallel.llm.pp=2")
SHARDED = ("parallel.placement=replicated", "parallel.dispatch=all")


def _as_it_is(meta: BatchMeta) -> BatchMeta:
    return meta


def _run_unpadded_rank(rank: int, world_size: int, folder: Path, *args: Any) -> str:
    """Train on the groups of a padded run without their padding, in a process of its own."""
    setattr(group_stream, "pad_microbatches", _as_it_is)  # noqa: B010 (mypy rejects an assignment to a function)
    return run_one_rank(rank, world_size, folder, *args)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [TOGETHER, PIPELINE, SHARDED], ids=["two replicas", "two stages", "sharded"])
def test_losses_and_gradients_are_those_without_padding(data: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    padded, plain = (request_for(data, tmp_path / name, *SETTINGS, *layout) for name in ("padded", "plain"))
    assert run_all(padded, padded) == ["", ""]
    assert fork_ranks(2, _run_unpadded_rank, (plain, plain), free_port(), FaultPoints()) == ["", ""]
    of_padded, of_plain = (read_metrics(request.run_dir) for request in (padded, plain))
    for key in ("loss", "grad_norm"):
        assert [s[key] for s in of_padded] == pytest.approx([s[key] for s in of_plain], rel=1e-6, abs=1e-6)
    for step, plain_step in zip(of_padded, of_plain, strict=True):
        assert step["padding"] > 0  # few tokens where ranks exchange samples: these make their loads almost equal
        assert "padding" not in plain_step
        assert (step["samples"], step["tokens"]) == (plain_step["samples"], plain_step["tokens"])
