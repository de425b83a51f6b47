"""`mmtrain launch ray` on a cluster of one machine: two workers, of which one is lost."""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mmtrain.report import read_metrics
from mmtrain.runtime.run_folder import read_run_state
from tests.flow.launched import train_arguments
from tests.flow.runs import MANY_STEPS, assert_same_end
from tests.forked_command import run_forked
from tests.waiting import MAX_WAIT_S, poll

ROOT = Path(__file__).parents[2]
NEW_START = "they meet at"  # rank 0 says so once in every start
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra `dev`)"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="Ray gives each of two workers a core"),
]


class RayJob:
    """The script of `launch ray` in a process of its own, which starts Ray on this machine and ends it."""

    def __init__(self, script: Path, folder: Path) -> None:
        self.log = folder / "ray.log"
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),  # Ray writes into it
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        for name in ("RAY_ADDRESS", "PYTHONWARNINGS"):
            env.pop(name, None)
        with self.log.open("w") as log:
            self.process = psutil.Popen([sys.executable, str(script)], cwd=folder, env=env, stdout=log, stderr=log)

    def ranks(self) -> Iterator[psutil.Process]:
        for process in self.process.children(recursive=True):
            if "runpy.run_module" in " ".join(process.cmdline()):
                yield process

    def end(self) -> int:
        code = self.process.wait(MAX_WAIT_S)
        assert isinstance(code, int)
        return code

    def __enter__(self) -> "RayJob":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            for process in (*self.process.children(recursive=True), self.process):
                process.kill()
            self.process.wait()


def written_script(data: Path, run_dir: Path) -> Path:
    """Plan for two ranks, and write the script of this plan."""
    plan, script = run_dir.parent / "plan.json", run_dir.parent / "job.py"
    [_, _, recipe, _, _, *settings] = train_arguments(data, run_dir, "--set", f"train.steps={MANY_STEPS}")
    made = run_forked(run_dir.parent, "plan", recipe, *settings, "--out", str(plan))
    assert made.returncode == 0, made.stderr
    size = ("--ranks-per-node", "2", "--run-dir", str(run_dir), "--out", str(script), "--json")
    written = run_forked(run_dir.parent, "launch", "ray", recipe, *settings, "--plan", str(plan), *size)
    assert json.loads(written.stdout) == {"file": str(script), "nodes": 1, "ranks_per_node": 2}
    return script


@pytest.mark.slow
def test_a_run_that_loses_a_worker_ends_as_an_undisturbed_one(data: Path, unbroken_long: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    script = written_script(data, run_dir)
    with RayJob(script, tmp_path) as job:
        poll(lambda: (run_dir / "checkpoints" / "latest").exists() or not job.process.is_running())
        [victim] = [rank for rank in job.ranks() if rank.environ()["RANK"] == "1"]
        victim.parent().kill()  # the worker of Ray that started it
        assert job.end() == 0, job.log.read_text()
    assert job.log.read_text().count(NEW_START) == 2
    assert read_run_state(run_dir)["status"] == "done"
    assert [step["step"] for step in read_metrics(run_dir)] == list(range(1, MANY_STEPS + 1))
    assert_same_end(run_dir, unbroken_long, MANY_STEPS)


@pytest.mark.long
def test_a_plan_that_is_not_on_the_worker_ends_the_job_at_once(data: Path, tmp_path: Path) -> None:
    script = written_script(data, tmp_path / "run")
    (tmp_path / "plan.json").unlink()
    with RayJob(script, tmp_path) as job:
        assert job.end() == 2, job.log.read_text()
    assert f"{tmp_path}/plan.json is not on " in job.log.read_text()
    assert not (tmp_path / "run" / "checkpoints").exists()
