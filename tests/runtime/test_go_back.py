"""Going back to an earlier checkpoint: which one is chosen, what is moved, and which requests are refused."""

import json
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import SUSPECT_SINCE, Ranks, SavingRun, Shard, ShardSpec, Snapshot, find, latest, save
from mmtrain.errors import UserError
from mmtrain.report.runlog import METRICS_FILE, read_metrics
from mmtrain.runtime.run_folder import ABANDONED_FOLDER, CHECKPOINTS_FOLDER
from mmtrain.runtime.training.go_back import SKIPPED_STATE, GoBack, go_back, parse_go_back, read_skipped_positions


def _save(run_dir: Path, step: int, suspect_since: int | None = None, skipped: tuple[int, ...] = ()) -> Path:
    state = {"next_step": step, SUSPECT_SINCE: suspect_since, SKIPPED_STATE: skipped}
    shard = Shard("w", ShardSpec((2,)), torch.ones(2))
    return save(run_dir / CHECKPOINTS_FOLDER, Snapshot(step, [shard], state), keep=9, ranks=Ranks.alone())


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Make the folder of a run that was saved every 10 steps and diverged after step 25."""
    for step in range(10, 60, 10):
        _save(tmp_path, step, suspect_since=26 if step > 25 else None)
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 56)))
    return tmp_path


def _steps(root: Path) -> list[str]:
    return sorted(folder.name for folder in find(root))


def test_the_last_good_checkpoint_becomes_the_newest_and_nothing_is_lost(run_dir: Path) -> None:
    text = go_back(run_dir, parse_go_back("last-good", "26-28"), SavingRun())
    root, abandoned = run_dir / CHECKPOINTS_FOLDER, run_dir / ABANDONED_FOLDER / "after-step-00000020"
    assert text == (
        f"going back to {root}/step-00000020; 3 newer checkpoints and the metrics of 35 steps are in {abandoned}"
    )
    assert _steps(root) == ["step-00000010", "step-00000020"]
    assert latest(root) == root / "step-00000020"
    assert _steps(abandoned) == ["step-00000030", "step-00000040", "step-00000050"]
    assert [step["step"] for step in read_metrics(abandoned)] == list(range(21, 56))
    assert read_skipped_positions(run_dir, {}) == (25, 26, 27)


def test_going_back_again_counts_steps_as_the_run_did_that_skipped_some(run_dir: Path) -> None:
    go_back(run_dir, GoBack(20, (26, 28)), SavingRun())
    _save(run_dir, 30, skipped=(25, 26, 27))
    go_back(run_dir, GoBack(20, None), SavingRun())
    assert read_skipped_positions(run_dir, {}) == (), "the checkpoint of step 20 skips nothing"
    _save(run_dir, 30, skipped=(25, 26, 27))
    _save(run_dir, 40, skipped=(25, 26, 27))
    go_back(run_dir, GoBack(30, (31, 31)), SavingRun())
    assert read_skipped_positions(run_dir, {SKIPPED_STATE: [25, 26, 27]}) == (25, 26, 27, 33)
    folders = {folder.name for folder in (run_dir / ABANDONED_FOLDER).iterdir()}
    assert folders == {"after-step-00000020", "after-step-00000020-2", "after-step-00000030"}


def test_going_back_to_the_newest_step_moves_nothing(tmp_path: Path) -> None:
    folder = _save(tmp_path, 10)
    assert go_back(tmp_path, GoBack(10), SavingRun()) == f"going back to {folder}"
    assert not (tmp_path / ABANDONED_FOLDER).exists()


@pytest.mark.parametrize(
    ("resume_from", "skip_steps", "message"),
    [
        ("best", None, "--resume-from: 'best' found; allowed: the step of a checkpoint, or last-good"),
        ("-3", None, "--resume-from: '-3' found"),
        ("20", "a-b", "--skip-steps: 'a-b' found; allowed: a step"),
        ("20", "28-26", "--skip-steps: '28-26' found; steps count from 1"),
        ("20", "0", "--skip-steps: '0' found; steps count from 1"),
        (
            "25",
            None,
            "--resume-from: 25 found, but .* no complete checkpoint of that step; allowed: 10, 20, 30, 40, 50",
        ),
        ("20", "20-22", "--skip-steps: 20-22 found, but the checkpoint was saved after step 20"),
    ],
)
def test_an_impossible_request_is_refused_before_any_file_moves(
    run_dir: Path, resume_from: str, skip_steps: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        go_back(run_dir, parse_go_back(resume_from, skip_steps), SavingRun())
    assert len(find(run_dir / CHECKPOINTS_FOLDER)) == 5
    assert not (run_dir / ABANDONED_FOLDER).exists()


def test_no_good_checkpoint_is_an_error(tmp_path: Path) -> None:
    _save(tmp_path, 10, suspect_since=5)
    with pytest.raises(UserError, match=r"of the 1 checkpoints in .* none is complete and from before"):
        go_back(tmp_path, GoBack(None), SavingRun())


def test_a_damaged_file_of_positions_is_named(tmp_path: Path) -> None:
    (tmp_path / "skipped_positions.json").write_text("[1, ")
    with pytest.raises(UserError, match=r"skipped_positions.json is damaged .* repeat --resume-from"):
        read_skipped_positions(tmp_path, {})
