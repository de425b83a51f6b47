"""Whole runs whose data comes from worker processes, or turns out bad on the way."""

import shutil
from dataclasses import replace
from pathlib import Path

from mmtrain.data import read_quarantine
from mmtrain.report import read_metrics
from mmtrain.runtime.rundir import QUARANTINE
from tests.flow.runs import request_for, run_all


def test_a_run_with_workers_is_the_run_without(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "data.workers=2")
    assert run_all(request, request) == ["", ""]
    assert [s["loss"] for s in read_metrics(tmp_path)] == [s["loss"] for s in read_metrics(unbroken)]


def test_what_several_ranks_and_epochs_find_broken_is_quarantined_once(data: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "data"
    shutil.copytree(data, spoiled)
    for image in (spoiled / "images").rglob("*.png"):
        content = bytearray(image.read_bytes())
        content[len(content) // 2] ^= 255  # header and end are whole: only decoding can tell
        image.write_bytes(content)
    settings = ("parallel.placement=unified", "parallel.llm.dp=2", "data.workers=1", "data.max_bad_rate=1")
    request = request_for(spoiled, tmp_path / "run", *settings, "train.steps=2")
    assert run_all(request, request) == ["", ""]
    first = read_quarantine(tmp_path / "run" / QUARANTINE)
    again = replace(request_for(spoiled, tmp_path / "run", *settings, "train.steps=6"), resume=True)
    assert run_all(again, again) == ["", ""]
    found = read_quarantine(tmp_path / "run" / QUARANTINE)
    assert len({(q.source, q.index) for q in found}) == len(found)
    assert found[: len(first)] == first, "resuming forgets nothing"
    assert len(first) < len(found)
