"""Commands end as they would have, whatever their standard streams are: closed, or of an old encoding."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.main import get_command

from mmtrain.cli import app as table
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.runtime.resilience.launch import free_port
from tests.cli.conftest import DEMO
from tests.cli.test_unusable_paths import commands
from tests.waiting import MAX_WAIT_S, poll

OLD_ENCODINGS = ["latin-1", "cp1252", "koi8-r"]
CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]
# What each command is run with, one after the other in one folder; without what needs recordings or an image generator.
# `{demo}` stands for the demo recipe with the settings that make it small.
CALLS = {
    "data demo": "--out made --samples 4 --heldout 1",
    "data tiny-model": "llava --out model",
    "data stats": "--recipe {demo}",
    "data group": "{demo}",
    "data check": "--recipe {demo}",
    "data show": "--recipe {demo}",
    "recipes copy": "demo",
    "schema": "",
    "doctor": "--no-links",
    "inspect": "model",
    "plan": "{demo} --out plan.json",
    "simulate": "{demo}",
    "report": "plan.json --out plan.html",
    "verify": "{demo} --plan plan.json",
    "profile": "{demo} --out costs.json",
    "train": "{demo} --run-dir run",
    "evaluate": "run --limit 2",
    "export": "run --out exported",
}
WRITTEN = ["made", "recipes", "model", "plan.json", "plan.html", "costs.json", "run", "exported"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that make the demo small."""
    data = tmp_path_factory.mktemp("data")
    generate_demo(data, seed=1, train=40, heldout=40)
    values = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    values += [f"data.tokenizer={data}/tokenizer.json", "train.steps=2"]
    return [part for value in values for part in ("--set", value)]


def in_shell(redirection: str, *arguments: str) -> list[str]:
    """Return how `mmtrain` is run from a shell, which closes streams."""
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "mmtrain", *arguments]


def run_shell(
    redirection: str, *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `mmtrain` from a shell, and read what it says."""
    command, env = in_shell(redirection, *arguments), os.environ | variables
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, encoding="latin-1")


@pytest.mark.parametrize("closed", [*(pytest.param(c, marks=pytest.mark.slow) for c in CLOSED[:-1]), CLOSED[-1]])
def test_commands_end_as_with_open_streams(tmp_path: Path, closed: str) -> None:
    assert run_shell(closed, "schema").returncode == 0
    wrong = run_shell(closed, "plan", str(tmp_path / "missing.yaml"))
    assert wrong.returncode == 2
    assert ("cannot read the recipe" in wrong.stderr) == ("2>" not in closed)


@pytest.mark.slow
@pytest.mark.parametrize("closed", CLOSED)
def test_a_run_trains_to_its_end(tmp_path: Path, settings: list[str], closed: str) -> None:
    run = tmp_path / "run"
    done = run_shell(closed, "train", str(DEMO), "--run-dir", str(run), *settings)
    assert done.returncode == 0, done.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_every_command_is_run_but_two() -> None:
    # These have tests of their own.
    launchers = {f"launch {name}" for name in ("kubernetes", "ray", "skypilot", "slurm")}
    apart = {
        "chat",
        "data serve",
        "data latents",
        "data digits",
        "data task-file",
        "init",
        "convert-config",
        *launchers,
    }
    assert set(commands(get_command(table.app))) == set(CALLS) | apart


@pytest.mark.long
@pytest.mark.timeout(2400)  # a dozen commands one after another, of which some plan and train
@pytest.mark.parametrize("closed", ["", *CLOSED])
def test_every_command_ends_well(tmp_path: Path, settings: list[str], closed: str) -> None:
    for command, template in CALLS.items():
        arguments = [
            part for word in template.split() for part in ([str(DEMO), *settings] if word == "{demo}" else [word])
        ]
        done = run_shell(closed, *command.split(), *arguments, folder=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert {name for name in WRITTEN if (tmp_path / name).exists()} == set(WRITTEN)


@pytest.mark.long
@pytest.mark.parametrize("closed", CLOSED)
def test_a_producer_serves_until_it_is_stopped(settings: list[str], closed: str) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with subprocess.Popen(in_shell(closed, "data", "serve", str(DEMO), *settings, "--bind", address)) as producer:
        listening = psutil.Process(producer.pid)
        poll(lambda: any(c.status == psutil.CONN_LISTEN for c in listening.net_connections("tcp")))
        producer.terminate()
        assert producer.wait(MAX_WAIT_S) == 0


@pytest.mark.parametrize("encoding", ["ascii", *(pytest.param(e, marks=pytest.mark.slow) for e in OLD_ENCODINGS)])
def test_tables_are_printed_in_any_encoding(settings: list[str], encoding: str) -> None:
    done = run_shell("", "plan", str(DEMO), *settings, PYTHONIOENCODING=encoding, COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert "Predicted step" in done.stdout


def test_files_do_not_get_the_number_of_a_closed_stream() -> None:
    program = "from mmtrain.cli.streams import mend_streams; mend_streams(); import os; print(os.open('/dev/null', 0))"
    done = subprocess.run(f'{sys.executable} -c "{program}" <&- 2>&-', shell=True, capture_output=True, check=True)
    assert int(done.stdout) > 2


def test_a_character_that_the_output_lacks_is_escaped() -> None:
    program = "from mmtrain.cli.streams import mend_streams; mend_streams(); print('\u2265 \u00e9')"
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert done.stdout == "\\u2265 \u00e9\n".encode("latin-1")
