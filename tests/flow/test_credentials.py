"""No credential of the environment reaches what a run writes or prints, whether it ends well or with an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.data.synthetic.demo import generate_demo

DEMO = Path(__file__).parents[2] / "recipes" / "demo.yaml"
ENVIRONMENT = {
    "LAB_API_KEY": "env-secret-4711",
    "FSSPEC_HTTP": json.dumps({"headers": {"X-Session": "header-secret-4711"}}),
    "HTTPS_PROXY": "http://me:proxy-secret-4711@host:1",
}


def train(folder: Path, *settings: str, code: str = "") -> "subprocess.CompletedProcess[str]":
    data = folder / "data"
    if not data.exists():
        generate_demo(data, seed=1, train=40, heldout=4)
    settings = (
        f"data.sources.0.path={data}/train.json",
        f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
        "cluster.ranks=2",
        "train.steps=2",
        "data.workers=1",
        "train.watchdog_s=60",
        *settings,
    )
    options = [part for setting in settings for part in ("--set", setting)]
    command = ["train", str(DEMO), "--run-dir", str(folder / "run"), *options]
    start = f"{code}\nimport sys\nfrom mmtrain.cli import main\nsys.argv = {['mmtrain', *command]!r}\nmain()"
    return subprocess.run(
        [sys.executable, "-c", start], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=300
    )


def leaked(folder: Path, done: "subprocess.CompletedProcess[str]") -> list[str]:
    """Return where a secret stands."""
    places = [str(path) for path in folder.rglob("*") if path.is_file() and b"secret-4711" in path.read_bytes()]
    return places + [name for name in ("stdout", "stderr") if "secret-4711" in getattr(done, name)]


@pytest.mark.slow
def test_a_run_writes_no_credentials(tmp_path: Path) -> None:
    done = train(tmp_path, "train.loggers=[tensorboard]")
    assert done.returncode == 0, done.stderr
    assert leaked(tmp_path, done) == []


# What a library raises of a server: all that it has asked with. Ranks are forked, so they have it too.
FAILING_STEP = """
import os
from mmtrain.runtime.training import loop
def failing(*_, **__):
    raise ConnectionError(f"https://me:url-secret-4711@host/x?sig=sig-secret-4711 {dict(os.environ)}")
loop.Loop.run = failing
"""


@pytest.mark.slow
def test_the_reports_of_a_failure_have_no_credentials(tmp_path: Path) -> None:
    done = train(tmp_path, code=FAILING_STEP)
    assert done.returncode != 0
    assert "ConnectionError" in done.stderr
    assert list((tmp_path / "run" / "failures").iterdir())
    assert leaked(tmp_path, done) == []
