"""Commands end as they would have, whatever their standard streams are: closed, or of an old encoding."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmtrain.data.synthetic.demo import generate_demo
from tests.cli.conftest import DEMO

CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that make the demo small."""
    data = tmp_path_factory.mktemp("data")
    generate_demo(data, seed=1, train=40, heldout=40)
    values = [f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json"]
    values += [f"data.tokenizer={data}/tokenizer.json", "train.steps=2"]
    return [part for value in values for part in ("--set", value)]


def run_shell(redirection: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `mmtrain` from a shell, which closes streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-m", "mmtrain", *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, encoding="latin-1")


@pytest.mark.parametrize("closed", CLOSED)
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


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii", "koi8-r"])
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
