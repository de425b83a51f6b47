"""The log on disk holds each step once, whatever interrupts the run."""

import json
import math
from pathlib import Path

import pytest

from mmtrain.balance.dispatch.phase_loads import OffNodeVolume, PhaseLoad
from mmtrain.report import RunLog, read_metrics
from mmtrain.report.metrics_record import DispatchMetrics, EdgeMetrics
from mmtrain.report.scalars import step_scalars
from tests.full_disk import full_disk
from tests.report.conftest import metrics


def log(run_dir: Path, first: int, last: int, **changes: float) -> None:
    with RunLog(run_dir, first, enabled=True) as run_log:
        for step in range(first, last + 1):
            run_log.step(metrics(step, **changes))


def test_a_line_holds_the_metrics_of_a_step(tmp_path: Path) -> None:
    edges = {"vision.0>llm.0": EdgeMetrics(4096, 0.25)}
    log(tmp_path, 1, 2, val_loss=1.3, val_exact=0.4, edges=edges, slow_ranks=("rank 1 takes",))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert json.loads(lines[1]) == {
        "step": 2,
        "loss": metrics(2).loss,
        "val_loss": 1.3,
        "val_exact": 0.4,
        "grad_norm": 0.81,
        "lr": 3e-4,
        "step_time_s": 0.5,
        "tokens_per_s": 12300.0,
        "samples_per_s": 44.0,
        "mfu": 0.031,
        "peak_flops": 2e12,
        "time_s": {"compute": 0.355, "wait": 0.1, "communication": 0.025, "data": 0.02},
        "peak_memory_bytes": 3 * 2**29,
        "samples": 22,
        "tokens": 6150,
        "epoch": 0.3,
        "slow_ranks": ["rank 1 takes"],
        "edges": {"vision.0>llm.0": {"bytes": 4096, "wait_s": 0.25}},
    }
    assert read_metrics(tmp_path) == [json.loads(line) for line in lines]


def test_a_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    with RunLog(tmp_path, 1, enabled=True) as run_log:
        run_log.step(metrics(1))
        assert [step["step"] for step in read_metrics(tmp_path)] == [1]


def test_resuming_drops_the_steps_that_are_repeated(tmp_path: Path) -> None:
    log(tmp_path, 1, 7)
    log(tmp_path, 5, 9, grad_norm=2.0)
    steps = read_metrics(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [step["grad_norm"] for step in steps] == [0.81] * 4 + [2.0] * 5


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path: Path) -> None:
    log(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    log(tmp_path, 3, 4)
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


@pytest.mark.parametrize("garbage", ["[1]", "7", "{}", '{"step": "x"}', '{"step": 2, "loss": "x"}', "\0\0"])
def test_garbage_among_the_steps_is_passed_over_and_set_aside(tmp_path: Path, garbage: str) -> None:
    log(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{garbage}\n{path.read_text()}")
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3]
    notes: list[str] = []
    with RunLog(tmp_path, 3, True, notes.append) as run_log:
        run_log.step(metrics(3))
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "metrics.jsonl.damaged-1").read_text().startswith(garbage)
    assert "1 of its lines cannot be read" in notes[0]


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path: Path) -> None:
    log(tmp_path, 1, 3)
    log(tmp_path, 1, 1)
    assert [step["step"] for step in read_metrics(tmp_path)] == [1]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    log(tmp_path, 1, 1, loss=math.nan, grad_norm=math.inf)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert (json.loads(text)["loss"], json.loads(text)["grad_norm"]) == (None, None)


def test_a_full_disk_delays_lines_and_later_steps_are_logged(tmp_path: Path) -> None:
    with RunLog(tmp_path, 1, enabled=True) as run_log:
        run_log.step(metrics(1))
        with full_disk(600):
            for step in range(2, 6):
                with pytest.raises(OSError, match="File too large"):
                    run_log.step(metrics(step))
        run_log.step(metrics(6))
        run_log.step(metrics(7))
    assert [step["step"] for step in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with RunLog(tmp_path / "run", 1, enabled=False) as run_log:
        run_log.step(metrics(1))
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path) == []


def test_curves_of_dispatches(tmp_path: Path) -> None:
    """Show the load of each phase, and on several nodes what goes to other nodes."""
    phases = {"vision": PhaseLoad(100.0, 120.0, 101.0)}
    dispatch = DispatchMetrics(0.5, phases, {"vision": OffNodeVolume(4096.0, 1024.0)})
    with RunLog(tmp_path, 1, enabled=True) as run_log:
        run_log.step(metrics(1, dispatch=dispatch))
    scalars = step_scalars(read_metrics(tmp_path)[0])
    curves = {name: scalars[name] for name in ("phase_max_after/vision", "off_node_total/vision")}
    assert curves == {"phase_max_after/vision": 101.0, "off_node_total/vision": 4096.0}
    assert scalars["dispatch/seconds"] == 0.5
