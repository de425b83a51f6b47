"""The command line starts fast, loads torch only where needed, and reports an error in one message and an exit code."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import mmtrain
from mmtrain.cli import app as table
from mmtrain.costs import CostTable
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.errors import DataError, MmtrainError, RecipeError, RunError, StoppedAndSaved
from tests.cli.conftest import DEMO, RunMmtrain

COMMANDS = [
    "init",
    "plan",
    "train",
    "profile",
    "simulate",
    "evaluate",
    "export",
    "inspect",
    "report",
    "doctor",
    "data",
    "data demo",
    "data digits",
    "data stats",
    "data group",
    "data check",
    "data show",
    "data serve",
    "recipes",
    "recipes copy",
    "launch",
    "launch kubernetes",
    "launch ray",
    "launch skypilot",
    "launch slurm",
    "schema",
    "convert-config",
]


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["data", "check", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    """What help loads decides how fast it answers; a clock would measure the load of the machine."""
    heavy = ["torch", "numpy", "yaml", "PIL", "megatron", "transformers", "tokenizers", "rich.console"]
    if arguments == ["--help"]:
        heavy.append("pydantic")  # typer itself loads it to parse the arguments of a command
    code = f"""
import sys
from mmtrain.cli import main
sys.argv = ["mmtrain", *{arguments!r}]
try:
    main()
except SystemExit:
    packages = {{".".join(name.split(".")[:2]) for name in sys.modules if name.startswith("mmtrain.")}}
    print(sorted(packages), [name for name in {heavy!r} if name in sys.modules])
"""
    names = "cli errors extras machine_limits printed_text process_end redaction system_calls system_errors version"
    light = [f"mmtrain.{name}" for name in names.split()]
    assert python(code).splitlines()[-1] == f"{light} []"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(run_mmtrain: RunMmtrain, command: str) -> None:
    result = run_mmtrain(*command.split(), "--help")
    assert result.returncode == 0
    assert "Usage: mmtrain " + command in result.stdout
    for line in result.stdout.splitlines():  # every option has a help text
        if line.startswith("  --"):
            assert len(line.split("  ")) > 2, line


def test_the_list_of_commands_shows_whole_sentences(run_mmtrain: RunMmtrain) -> None:
    out = run_mmtrain("--help").stdout
    assert all(f"  {command} " in out for command in COMMANDS if " " not in command)
    assert "..." not in out.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("words", "completed"),
    [("mmtrain si", {"simulate"}), ("mmtrain recipes copy whatif/internvl", {"whatif/internvl_26b"})],
)
def test_a_shell_completes_commands_and_names(words: str, completed: set[str]) -> None:
    """As bash asks after `mmtrain --install-completion`."""
    env = {"_MMTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run([sys.executable, "-m", "mmtrain"], capture_output=True, text=True, env={**os.environ, **env})
    assert set(done.stdout.split()) == completed, done.stderr


def test_version(run_mmtrain: RunMmtrain) -> None:
    assert run_mmtrain("--version").stdout == f"mmtrain {mmtrain.__version__}\n"


@pytest.mark.parametrize(
    "args", [["no-such"], ["plan"], ["plan", "r.yaml", "--set"], ["plan", "r.yaml", "--top", "-1"], ["data", "demo"]]
)
def test_wrong_usage_exits_2_without_a_traceback(run_mmtrain: RunMmtrain, args: list[str]) -> None:
    result = run_mmtrain(*args)
    assert result.returncode == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RecipeError, 2),
        (DataError, 2),
        (MmtrainError, 1),
        (RunError, 1),
        (StoppedAndSaved, 75),
        (KeyboardInterrupt, 130),
    ],
)
def test_errors_become_one_message_and_an_exit_code(
    run_mmtrain: RunMmtrain, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise error("what happened")

    monkeypatch.setattr(table, "app", failing)
    result = run_mmtrain()
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    if issubclass(error, MmtrainError):
        assert result.stderr == "mmtrain: what happened\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")],
)
def test_a_limit_of_processes_is_named(
    run_mmtrain: RunMmtrain, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(table, "app", failing)
    result = run_mmtrain()
    assert result.returncode == 2
    assert result.stderr.startswith("mmtrain: the system starts no more threads or processes for this user: ")
    assert "ulimit -u" in result.stderr


def test_threads_are_bound_to_no_core(tmp_path: Path) -> None:
    """OpenMP binds this process to one core when torch is imported, and so all that it starts."""
    environment = os.environ | {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    code = """
import os, sys
before = os.sched_getaffinity(0)
from mmtrain.cli import main
sys.argv = ["mmtrain", "schema"]
try:
    main()
except SystemExit:
    import torch
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    print(os.sched_getaffinity(0) == before)
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "True"
    assert "mmtrain: ignoring OMP_PROC_BIND, OMP_PLACES, which would bind" in done.stderr


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = typer.Typer(pretty_exceptions_enable=False)

    @failing.command()
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(table, "app", failing)
    monkeypatch.setattr(sys, "argv", ["mmtrain"])
    with pytest.raises(ZeroDivisionError):
        table.main()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_wrong_recipe_is_reported_with_all_its_errors(run_mmtrain: RunMmtrain, tmp_path: Path, command: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\nmodle: {}\n", encoding="utf-8")
    result = run_mmtrain(command, str(recipe), "--set", "train.steps=0")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"mmtrain: {recipe}: ")
    assert "modle: unknown key; did you mean model?" in result.stderr
    assert "train.steps: found 0, allowed: a whole number of at least 1, or null (--set train.steps=0)" in result.stderr


def test_a_wrong_recipe_is_reported_before_torch_loads(tmp_path: Path) -> None:
    code = f"""
import sys
from mmtrain.cli import main
sys.argv = ["mmtrain", "train", "{tmp_path}/missing.yaml"]
try:
    main()
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    assert python(code).split() == ["2", "False"]


def test_planning_loads_no_torch_on_a_machine_without_gpu(tmp_path: Path) -> None:
    """Loading torch takes longer than planning the demo."""
    generate_demo(tmp_path / "data", seed=1, train=60, heldout=4)
    code = f"""
import sys
from mmtrain.cli import main
from mmtrain.api import local_cluster
local_cluster.GPU_DRIVER_FILES = ()
paths = ["data.sources.0.path={tmp_path}/data/train.json", "data.tokenizer={tmp_path}/data/tokenizer.json"]
sys.argv = ["mmtrain", "plan", {str(DEMO)!r}, "--set", paths[0], "--set", paths[1]]
try:
    main()
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
"""
    assert python(code).split()[-2:] == ["0", "False"]


@pytest.mark.slow  # loads torch
def test_a_terminal_shows_that_a_run_starts_before_torch_is_loaded(
    run_mmtrain: RunMmtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes seconds, so the first rank says it. Here the run then ends, because its data is missing."""
    monkeypatch.chdir(tmp_path)
    shown = []
    for is_terminal, rank in ((True, "0"), (True, "1"), (False, "0")):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setenv("RANK", rank)
        shown.append(run_mmtrain("train", DEMO).stderr.startswith("starting: loading torch\n"))
    assert shown == [True, False, False]


def test_python_dash_m(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mmtrain", "train", str(tmp_path / "missing.yaml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == f"mmtrain: {tmp_path}/missing.yaml: cannot read the recipe: No such file or directory\n"


def test_demo_data(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    args = ["data", "demo", "--out", str(tmp_path / "d"), "--samples", "12", "--heldout", "3"]
    result = run_mmtrain(*args, "--json")
    assert result.returncode == 0
    summary = json.loads(result.stdout)
    assert (summary["train"], summary["heldout"]) == (12, 3)
    assert len(json.loads((tmp_path / "d/train.json").read_text())) == 12
    printed = run_mmtrain(*args).stdout
    assert printed.startswith(f"{tmp_path}/d: 12 training and 3 held-out samples, {summary['images']} images")


def test_demo_data_keeps_other_files_of_the_folder(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not lose me")
    result = run_mmtrain("data", "demo", "--out", str(tmp_path))
    assert result.returncode == 2
    assert (tmp_path / "thesis.txt").exists()


def test_profile_checks_its_output_file_before_it_measures(run_mmtrain: RunMmtrain, tmp_path: Path) -> None:
    demo = str(DEMO)
    nowhere = run_mmtrain("profile", demo, "--tp", "1", "--out", str(tmp_path / "none" / "costs.json"))
    assert nowhere.returncode == 2
    assert "costs.json: cannot write the cost table: No such file or directory" in nowhere.stderr
    other = tmp_path / "costs.json"
    CostTable(hardware="h100-80g", device="x", precision="bf16", software={}, date="2026-01-01").save(other)
    refused = run_mmtrain("profile", demo, "--tp", "1", "--set", "cluster.hardware=cpu-core", "--out", str(other))
    assert refused.returncode == 2
    assert "was measured with hardware h100-80g, now it is cpu-core" in refused.stderr
    on_a_core = run_mmtrain("profile", demo, "--tp", "1", "--set", "cluster.hardware=h100", "--out", str(other))
    assert on_a_core.returncode == 2
    assert "h100-80g, and this machine would be measured: `one core of " in on_a_core.stderr
