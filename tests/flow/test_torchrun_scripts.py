"""The script that `launch skypilot` and `launch kubernetes` start on each node: two nodes, of which one is lost."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from mmtrain.report import read_metrics
from mmtrain.runtime.resilience.launch import free_port
from mmtrain.runtime.run_folder import read_run_state
from tests.flow.launched import train_arguments
from tests.flow.runs import MANY_STEPS, assert_same_end
from tests.forked_command import run_forked
from tests.waiting import MAX_WAIT_S, poll

ROOT = Path(__file__).parents[2]
STATED_PORT = "--master-port 29500"  # another test may use it


class Nodes:
    """Two processes that run the script as two machines would."""

    def __init__(self, script: str, folder: Path) -> None:
        self.logs = [folder / f"node-{rank}.log" for rank in range(2)]
        script = script.replace(STATED_PORT, f"--master-port {free_port()}")
        self.processes = [self._start(script, folder, rank) for rank in range(2)]

    def _start(self, script: str, folder: Path, rank: int) -> psutil.Popen:
        env = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "0",
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NODE_RANK": str(rank),
        }
        with self.logs[rank].open("a") as log:
            return psutil.Popen(["bash", "-c", script], cwd=folder, env=env, stdout=log, stderr=log)

    def lose(self, rank: int) -> None:
        """Kill all that runs on a node."""
        for process in (*self.processes[rank].children(recursive=True), self.processes[rank]):
            process.kill()

    def end(self) -> list[int]:
        return [int(process.wait(MAX_WAIT_S) or 0) for process in self.processes]

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        for rank, process in enumerate(self.processes):
            if process.is_running():
                self.lose(rank)
                process.wait()


@pytest.mark.slow
def test_a_task_that_starts_again_after_a_lost_node_ends_as_an_undisturbed_one(
    data: Path, unbroken_long: Path, tmp_path: Path
) -> None:
    run_dir, task = tmp_path / "run", tmp_path / "task.yaml"
    [_, _, _, _, _, *settings] = train_arguments(data, run_dir, "--set", f"train.steps={MANY_STEPS}")
    (tmp_path / "data").symlink_to(data)
    settings = [word.replace(f"{data}/", "data/") for word in settings]
    (tmp_path / "demo.yaml").write_text((ROOT / "recipes" / "demo.yaml").read_text())
    made = run_forked(tmp_path, "plan", "demo.yaml", *settings, "--out", "plan.json")
    assert made.returncode == 0, made.stderr
    where = ("--run-dir", str(run_dir), "--volume", f"shared:{tmp_path}", "--ranks-per-node", "1", "--out", str(task))
    written = run_forked(tmp_path, "launch", "skypilot", "demo.yaml", *settings, "--plan", "plan.json", *where)
    assert written.returncode == 0, written.stderr
    script = yaml.safe_load(task.read_text())["run"]
    with Nodes(script, tmp_path) as nodes:
        poll(lambda: (run_dir / "checkpoints" / "latest").exists() or not nodes.processes[0].is_running())
        nodes.lose(1)
        [first, lost] = nodes.end()
        assert (first, lost) == (1, -signal.SIGKILL), nodes.logs[0].read_text()
    with Nodes(script, tmp_path) as nodes:
        assert nodes.end() == [0, 0], nodes.logs[0].read_text()
    assert "resuming after step" in nodes.logs[0].read_text()
    assert read_run_state(run_dir)["status"] == "done"
    assert [step["step"] for step in read_metrics(run_dir)] == list(range(1, MANY_STEPS + 1))
    assert_same_end(run_dir, unbroken_long, MANY_STEPS)
