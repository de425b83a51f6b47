"""What a stopped run says is the command that continues it."""

import shlex
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest

from mmtrain.runtime.run_folder import read_run_state
from mmtrain.runtime.training import train
from mmtrain.runtime.training.train_request import TrainRequest
from tests.distributed import fork_ranks
from tests.faults import FailAt
from tests.flow.runs import NUM_STEPS, RECIPE, SMALL
from tests.forked_command import main_here, run_forked


def _main_with_a_signal(
    rank: int, size: int, scratch: Path, folder: Path, arguments: tuple[str, ...]
) -> CompletedProcess[str]:
    """Run `mmtrain` in this process, which gets a signal in its second step."""
    start = train.start_training

    def start_training(request: TrainRequest) -> None:
        start(replace(request, faults=FailAt(0, 1, "signal")))

    with patch.object(train, "start_training", start_training):
        return main_here(rank, size, scratch, folder, arguments)


@pytest.mark.slow
def test_the_last_line_of_a_stopped_run_is_the_command_to_paste(data: Path, tmp_path: Path) -> None:
    """With every setting and the folder, quoted for a shell: here the folder has a space in its name."""
    settings = [
        *(f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"),
        *(f"data.tokenizer={data}/tokenizer.json", "cluster.ranks=1", "parallel.placement=unified", *SMALL),
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    command_line = ("train", str(RECIPE), *words, "--run-dir", "my run")
    [stopped] = fork_ranks(1, _main_with_a_signal, tmp_path, command_line)
    assert isinstance(stopped, CompletedProcess)
    assert stopped.returncode == 75, stopped.stderr
    assert read_run_state(tmp_path / "my run")["status"] == "stopped"
    *_, said, command = stopped.stderr.splitlines()
    assert said.endswith("continue with:")

    name, *arguments = shlex.split(command)
    assert name == "mmtrain"
    resumed = run_forked(tmp_path, *arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert read_run_state(tmp_path / "my run") == {"status": "done", "step": NUM_STEPS, "error": None}
