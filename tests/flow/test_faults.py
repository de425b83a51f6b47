"""Whole runs with faults: signals, kills, hangs, gradients that are not finite, full disks."""

import json
import os
import pickle
import re
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mmtrain.checkpoint import Checkpoint, find, open_newest_good
from mmtrain.checkpoint.verify_files import read_manifest
from mmtrain.planning.artifact.plan import Plan
from mmtrain.program import Action, Backward, Dispatch, Forward
from mmtrain.report import read_metrics
from mmtrain.runtime.resilience.failures import read_failures, stacks_path
from mmtrain.runtime.resilience.flight_recorder import flight_recorder_path
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, SKIPPED_STEPS_FILE, read_run_state
from mmtrain.runtime.training.go_back import GoBack
from mmtrain.runtime.world import torch_seed
from tests.faults import WATCHDOG_S, AllOf, FailAt, SignalBeforeSteps
from tests.flow.runs import (
    NUM_STEPS,
    REPLICATED,
    assert_same_end,
    assert_same_weights,
    launch,
    refuse,
    request_for,
    run_all,
    tensors,
)
from tests.plans import plan_recipe

# The fixture of the unbroken run, and settings: each unit on a rank of its own, or all units on both ranks.
DISAGGREGATED, SHARDED = ("unbroken", ()), ("unbroken_replicated", REPLICATED)
PLACEMENTS = [
    pytest.param(*DISAGGREGATED, id="disaggregated"),
    pytest.param(*SHARDED, id="replicated", marks=pytest.mark.slow),
]
WATCHED = f"train.watchdog_s={WATCHDOG_S}"
SLOW_PLANNING_S = 1.5 * WATCHDOG_S  # of processor time, from the start of the process
# `tests/runtime/test_signals.py` listens to the others, so here they are long runs.
SLOW_SIGNALS = [
    pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
]


@pytest.mark.parametrize("number", [signal.SIGTERM, *SLOW_SIGNALS])
def test_a_run_whose_launcher_gets_a_signal_saves_and_can_be_resumed(
    data: Path, unbroken: Path, tmp_path: Path, number: signal.Signals
) -> None:
    request = request_for(data, tmp_path, "train.checkpoint.every=0")
    code, message = launch(request, FailAt(1, 2, "signal launcher", number=number))
    assert code == 75
    assert "step-0000000" in message
    state = read_run_state(tmp_path)
    assert state["status"] == "stopped"
    assert state["step"] == 3
    assert len(read_metrics(tmp_path)) == state["step"]
    assert launch(replace(request, resume=True)) == (0, "")
    assert read_run_state(tmp_path) == {"status": "done", "step": NUM_STEPS, "error": None}
    assert_same_end(tmp_path, unbroken)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(data: Path, tmp_path: Path, rank: int) -> None:
    request = request_for(data, tmp_path, "train.checkpoint.every=0")
    for message in run_all(request, request, faults=FailAt(rank, 2, "signal", action=Backward)):
        assert message.startswith("StoppedAndSaved")
    assert read_run_state(tmp_path) == {"status": "stopped", "step": 3, "error": None}
    assert len(read_metrics(tmp_path)) == 3
    assert [folder.name for folder in find(tmp_path / CHECKPOINTS_FOLDER)] == ["step-00000003"]


@pytest.mark.slow  # `tests/runtime/test_hooks.py` catches up without a model
@pytest.mark.parametrize("step", [2, NUM_STEPS - 1])
def test_a_signal_in_a_step_that_measures_loses_no_measurement(data: Path, tmp_path: Path, step: int) -> None:
    measuring = ("train.validate_every=3", "train.validate_batches=1", "train.best={metric: val_loss}")
    unbroken, broken = (request_for(data, tmp_path / name, *measuring) for name in ("unbroken", "broken"))
    assert run_all(unbroken, unbroken) == ["", ""]
    run_all(broken, broken, faults=FailAt(1, step, "signal"))
    assert len([entry for entry in read_metrics(broken.run_dir) if "val_loss" in entry]) == step // 3
    resumed = replace(broken, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    losses = [[entry.get("val_loss") for entry in read_metrics(run.run_dir)] for run in (unbroken, broken)]
    assert losses[0] == losses[1]
    assert [loss is not None for loss in losses[1]] == [False, False, True, False, False, True]
    if step != NUM_STEPS - 1:  # else the last checkpoint was saved before the last measurement
        assert_same_end(broken.run_dir, unbroken.run_dir)


def test_a_run_that_gets_a_signal_in_its_last_step_is_done(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path)
    assert run_all(request, request, faults=FailAt(0, NUM_STEPS - 1, "signal")) == ["", ""]
    assert read_run_state(tmp_path)["status"] == "done"


@pytest.mark.parametrize(
    ("unbroken_run", "settings", "action"),
    [
        pytest.param(*DISAGGREGATED, Backward, id="disaggregated"),
        pytest.param(*SHARDED, Backward, id="replicated", marks=pytest.mark.slow),
        pytest.param(*SHARDED, Dispatch, id="replicated, in a dispatch", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_replaced_and_the_run_ends_as_if_unbroken(
    data: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    unbroken_run: str,
    settings: tuple[str, ...],
    action: type[Action],
) -> None:
    train = request_for(data, tmp_path / "run", *settings, max_restarts=1)
    fault = FailAt(1, 3, "kill", action=action, once=tmp_path / "killed")
    assert launch(train, fault) == (0, "")
    assert (tmp_path / "killed").exists()
    assert_same_end(tmp_path / "run", request.getfixturevalue(unbroken_run))


def test_restarts_are_limited_and_wrong_input_is_not_restarted(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, max_restarts=1)
    code, message = launch(request, FailAt(0, 1, "exception"))
    assert code == 1
    assert message.startswith("rank 0 failed: ValueError: a failure injected by the test")
    state = read_run_state(tmp_path)
    assert (state["status"], state["step"]) == ("failed", 0)
    assert state["error"] == message
    code, message = launch(request_for(data, unbroken, max_restarts=1))
    assert (code, "holds a run already" in message) == (2, True)
    assert read_run_state(unbroken)["status"] == "done"


def test_out_of_memory_names_stage_samples_and_bytes(data: Path, tmp_path: Path) -> None:
    code, message = launch(request_for(data, tmp_path), FailAt(1, 1, "out of memory", action=Backward))
    assert code == 1
    assert message.startswith("rank 1, step 2: out of memory in stage llm.0, microbatch llm:0.")
    sample_ids = {sample["id"] for sample in json.loads((data / "train.json").read_text())}
    named = message.partition("; samples ")[2].partition(" (")[0].partition(" and ")[0].split(", ")
    assert set(named) <= sample_ids
    assert "GiB predicted at most" in message
    assert "GiB measured before" in message


@pytest.mark.slow  # `test_train.py` damages a checkpoint of a run that has ended
def test_a_checkpoint_that_the_disk_corrupts_is_passed_over(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "run")
    assert run_all(request, request, faults=FailAt(1, NUM_STEPS, "corrupt")) == ["", ""]
    resumed = replace(request, resume=True)
    assert run_all(resumed, resumed) == ["", ""]
    assert_same_weights(tmp_path / "run", unbroken)


@pytest.mark.parametrize(("unbroken_run", "settings"), PLACEMENTS)
def test_a_step_whose_gradient_is_not_finite_changes_no_weight(
    data: Path, tmp_path: Path, unbroken_run: str, settings: tuple[str, ...]
) -> None:
    """In step 3 on the first rank, that of the encoder, in step 5 and in the last one on the other, that of the LLM."""
    request = request_for(data, tmp_path, "train.checkpoint.every=1", "train.checkpoint.keep=9", *settings)
    assert run_all(request, request, faults=AllOf(FailAt(0, 2, "nan"), FailAt(1, range(4, 6), "nan"))) == ["", ""]
    folders = [tmp_path / CHECKPOINTS_FOLDER / f"step-{step:08d}" for step in range(1, NUM_STEPS + 1)]
    checkpoints = [Checkpoint(folder, read_manifest(folder)) for folder in folders]
    assert [checkpoint.state["num_updates"] for checkpoint in checkpoints] == [1, 2, 2, 3, 3, 3]
    weights = [tensors(checkpoint) for checkpoint in checkpoints]
    for step, (before, after) in enumerate(pairwise(weights), start=2):
        unchanged = all(torch.equal(after[name], before[name]) for name in before)
        assert unchanged == (step in (3, 5, 6)), f"step {step}"
    assert all(tensor.isfinite().all() for tensor in weights[-1].values() if tensor.is_floating_point())
    skipped = [json.loads(line) for line in (tmp_path / SKIPPED_STEPS_FILE).read_text().splitlines()]
    assert [(entry["step"], entry["grad_norm"]) for entry in skipped] == [(3, "nan"), (5, "nan"), (6, "nan")]
    sample_ids = {sample["id"] for sample in json.loads((data / "train.json").read_text())}
    for entry in skipped:
        assert len(entry["samples"]) == read_metrics(tmp_path)[entry["step"] - 1]["samples"]
        assert set(entry["samples"]) <= sample_ids


def test_records_that_cannot_be_written_do_not_end_the_run(data: Path, tmp_path: Path) -> None:
    (tmp_path / SKIPPED_STEPS_FILE).symlink_to("/dev/full")
    request = request_for(data, tmp_path, "train.steps=3")
    assert run_all(request, request, faults=FailAt(1, 2, "nan")) == ["", ""]
    assert read_run_state(tmp_path)["status"] == "done"


def test_too_many_bad_steps_end_the_run(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.max_nonfinite_steps=2")
    for message in run_all(request, request, faults=FailAt(0, range(1, 6), "nan")):
        assert message.startswith("RunError: step 3: the gradient norm was not finite in 2 steps in a row")
    assert read_run_state(tmp_path)["status"] == "failed"


@pytest.mark.parametrize(("unbroken_run", "settings"), PLACEMENTS)
def test_training_goes_on_over_a_full_disk(
    data: Path, tmp_path: Path, request: pytest.FixtureRequest, unbroken_run: str, settings: tuple[str, ...]
) -> None:
    train = request_for(data, tmp_path, *settings)
    assert run_all(train, train, faults=FailAt(1, range(5), "disk full")) == ["", ""]
    assert_same_end(tmp_path, request.getfixturevalue(unbroken_run))
    assert [f.name for f in (tmp_path / CHECKPOINTS_FOLDER).iterdir() if f.is_dir()] == ["step-00000006"], (
        "no draft is left"
    )


def test_a_disk_that_stays_full_ends_the_run(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, "train.checkpoint.max_failures=2", "train.checkpoint.async_save=false")
    for message in run_all(request, request, faults=FailAt(0, range(9), "disk full")):
        assert message.startswith("RunError: 2 checkpoints in a row could not be saved")
        assert "No space left on device" in message
    assert len(read_metrics(tmp_path)) == 4


def test_a_hang_is_explained_by_every_rank(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED, "train.checkpoint.async_save=false")
    code, message = launch(request, FailAt(0, 2, "hang", action=Forward))
    assert code == 1
    lead, *secondary = message.splitlines()
    assert lead.startswith("rank 0, step 3, in `F vision.0 vision:0.0`: made no progress")
    [other] = secondary
    assert "secondary: rank 1, step 3, in `F llm.0 llm:0.0`" in other
    assert "`SA vision.0>llm.0 vision:0.0 llm:0.0 @1` on rank 0, which never ran" in other
    assert "in before_action" in stacks_path(tmp_path, 0).read_text(), "where the test injects the hang"
    assert "in _wait" in stacks_path(tmp_path, 1).read_text()
    assert {failure.rank for failure in read_failures(tmp_path)} == {0, 1}
    assert read_run_state(tmp_path) == {"status": "failed", "step": 2, "error": message}
    recorded = [pickle.loads(flight_recorder_path(tmp_path, rank).read_bytes()) for rank in (0, 1)]
    assert all(entry["profiling_name"].startswith("gloo:") for dump in recorded for entry in dump["entries"])
    assert min(len(dump["entries"]) for dump in recorded) > 0


@pytest.mark.slow  # `tests/runtime/test_watchdog.py` ends a run whose rank is silent
def test_a_stopped_process_is_named(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED)
    code, message = launch(request, FailAt(0, 1, "stop"))
    assert code == 1
    assert message.startswith("rank 0 left no report: it is dead, or stopped by the system")
    assert [f.rank for f in read_failures(tmp_path)] == [1]


@pytest.mark.parametrize(("unbroken_run", "settings"), PLACEMENTS)
def test_a_slow_rank_is_no_hang(
    data: Path, tmp_path: Path, request: pytest.FixtureRequest, unbroken_run: str, settings: tuple[str, ...]
) -> None:
    train = request_for(data, tmp_path, WATCHED, *settings)
    assert run_all(train, train, faults=FailAt(1, range(2, 4), "slow")) == ["", ""]
    assert_same_end(tmp_path, request.getfixturevalue(unbroken_run))


@pytest.mark.slow  # a save of a run that stops, on the same disk, is in the quick tests
def test_saves_on_a_slow_disk_take_longer_than_the_watchdog_waits(data: Path, unbroken: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED, "train.checkpoint.every=3")
    assert run_all(request, request, faults=FailAt(1, range(9), "slow disk")) == ["", ""]
    assert_same_end(tmp_path, unbroken)
    assert [folder.name for folder in find(tmp_path / CHECKPOINTS_FOLDER)] == ["step-00000006", "step-00000003"]


@pytest.mark.slow  # 9 s
def test_a_run_that_is_stopped_on_a_slow_disk_keeps_its_work(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED, "train.checkpoint.every=0")
    faults = AllOf(FailAt(0, range(9), "slow disk"), FailAt(1, 2, "signal"))
    for message in run_all(request, request, faults=faults):
        assert message.startswith("StoppedAndSaved")
    assert read_run_state(tmp_path) == {"status": "stopped", "step": 3, "error": None}
    assert [folder.name for folder in find(tmp_path / CHECKPOINTS_FOLDER)] == ["step-00000003"]


@pytest.mark.slow  # 6 s
def test_a_disk_that_is_stuck_is_named_with_its_file_and_speed(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED, "train.checkpoint.async_save=false")
    code, message = launch(request, FailAt(1, 2, "stuck disk"))
    assert code == 1
    lead, *secondary = message.splitlines()
    assert lead.startswith(f"rank 1, step 2, in `saving a checkpoint`: no progress with {tmp_path}/checkpoints/draft-")
    assert "/rank-00001.safetensors for " in lead
    assert re.search(r"\d\.\d\d MB at \d+\.\d\d MB/s before that$", lead)
    [other] = secondary
    assert "secondary: rank 0, step 2, in `saving a checkpoint`: waited" in other
    assert "for other ranks to take part" in other


def _stopping_planner(*inputs: Any, **options: Any) -> Plan:
    """Be stopped by the system while the other ranks wait for the plan."""
    os.kill(os.getpid(), signal.SIGSTOP)
    return plan_recipe(*inputs, **options)


def _slow_planner(*inputs: Any, **options: Any) -> Plan:
    """Plan for longer than the watchdog waits for an action."""
    while time.process_time() < SLOW_PLANNING_S:
        pass
    return plan_recipe(*inputs, **options)


def _deadlocked_planner(*inputs: Any, **options: Any) -> Plan:
    """Wait for a lock that this thread holds."""
    lock = threading.Lock()
    with lock, lock:
        return plan_recipe(*inputs, **options)


@pytest.mark.slow  # `test_a_stopped_process_is_named` stops one in a later step
def test_a_rank_that_is_stopped_before_the_first_step_is_named(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED)
    code, message = launch(request, SignalBeforeSteps(1))
    assert code == 1
    lead, other = message.splitlines()
    assert lead == "rank 1 left no report: it is dead, or stopped by the system"
    assert other.startswith("  secondary: rank 0, in `waiting for the first step of all ranks`: ")


@pytest.mark.slow  # as for a rank that is stopped before the first step, the heartbeat ends
def test_a_rank_that_is_stopped_while_it_plans_is_named(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED)
    code, message = launch(replace(request, planner=_stopping_planner))
    assert code == 1
    lead, other = message.splitlines()
    assert lead == "rank 0 left no report: it is dead, or stopped by the system"
    assert other.startswith("  secondary: rank 1, in `waiting for the plan`: ")


@pytest.mark.slow  # `tests/runtime/test_watchdog.py` tells a rank that plans from one that does not
def test_a_rank_that_is_deadlocked_while_it_plans_is_named(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED)
    code, message = launch(replace(request, planner=_deadlocked_planner))
    assert code == 1
    lead, other = message.splitlines()
    assert lead.startswith("rank 0, in `choosing the plan`: made no progress for ")
    assert other.startswith("  secondary: rank 1, in `waiting for the plan`: waited ")
    assert "in _deadlocked_planner" in stacks_path(tmp_path, 0).read_text()


@pytest.mark.slow
def test_a_start_may_take_longer_than_the_watchdog_waits(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path, WATCHED, "train.steps=2", planner=_slow_planner)
    assert launch(request) == (0, "")


def test_torch_draws_the_same_numbers_on_all_ranks(unbroken: Path) -> None:
    checkpoint = open_newest_good(unbroken / CHECKPOINTS_FOLDER, refuse)
    state = torch.Generator().manual_seed(torch_seed(1)).get_state()
    for rank in range(2):
        assert checkpoint.rank_state(rank)["torch_rng"] == bytes(state.tolist()).hex()


@pytest.mark.slow  # 4 s; `tests/runtime` chooses the step to go back to
def test_a_run_goes_back_to_before_bad_steps_and_leaves_their_samples_out(
    data: Path, unbroken: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    request = request_for(data, run_dir, "train.checkpoint.every=1", "train.checkpoint.keep=1")
    assert run_all(request, request, faults=FailAt(0, range(2, 4), "nan")) == ["", ""]
    root = run_dir / CHECKPOINTS_FOLDER
    assert [folder.name for folder in find(root)] == ["step-00000006", "step-00000002"]
    # The restart must neither go back again nor forget what to leave out, which no checkpoint holds yet.
    changed = request_for(data, run_dir, "train.checkpoint.every=0", max_restarts=1)
    back = replace(changed, resume=True, go_back=GoBack(None, (3, 4)))
    assert launch(back, FailAt(1, 3, "kill", once=tmp_path / "killed")) == (0, "")
    assert (tmp_path / "killed").exists()
    steps, expected = read_metrics(run_dir), read_metrics(unbroken)
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    for name in ("tokens", "epoch"):
        assert [step[name] for step in steps[:4]] == [expected[number][name] for number in (0, 1, 4, 5)]
    assert open_newest_good(root, refuse).state["skipped_positions"] == [2, 3]
    abandoned = run_dir / "abandoned" / "after-step-00000002"
    assert [folder.name for folder in find(abandoned)] == ["step-00000006"]
    assert [step["step"] for step in read_metrics(abandoned)] == [3, 4, 5, 6]
    assert [json.loads(line)["step"] for line in (abandoned / SKIPPED_STEPS_FILE).read_text().splitlines()] == [3, 4]


def test_a_signal_before_the_first_step_saves_after_it(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path)
    for message in run_all(request, request, faults=SignalBeforeSteps(1, signal.SIGTERM)):
        assert message.startswith("StoppedAndSaved")
    assert read_run_state(tmp_path) == {"status": "stopped", "step": 1, "error": None}
