"""What `pip install mmtrain` runs without torch, on Linux and on Windows; and what each other command asks for.

Every command runs in a process of its own in which packages of extras are hidden, and what only Unix has
(`tests/core_process.py`). macOS lacks less than Windows.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.weights.tiny_model import find_family_by_name, write_tiny_model
from tests.core_process import PACKAGES, UNIX_MODULES, UNIX_NAMES
from tests.test_public_surface import WITHOUT_TORCH

ROOT = Path(__file__).parents[2]
# Command -> its arguments, in a folder with `data`, `tiny` and `run`.
CORE: dict[str, list[str]] = {
    "plan": ["run/recipe.yaml", "--out", "plan.json"],
    "simulate": ["run"],
    "report": ["run", "--out", "report.html"],
    "inspect": ["tiny"],
    "launch kubernetes": [
        *("run/recipe.yaml", "--plan", "run/plan.json"),
        *("--image", "ours", "--claim", "shared", "--mount", "/"),
    ],
    "launch skypilot": ["run/recipe.yaml", "--plan", "run/plan.json", "--volume", "ours:/", "--run-dir", "/run"],
    "launch ray": ["run/recipe.yaml", "--plan", "run/plan.json"],
    "launch slurm": ["run/recipe.yaml", "--plan", "run/plan.json"],
    "init": [
        "--model",
        "tiny",
        "--data",
        "data/train.json",
        "--gpus",
        "2",
        "--hardware",
        "h100-80g",
        "--out",
        "new.yaml",
    ],
    "doctor": [],
    "schema": [],
    "convert-config": ["other.yaml"],
    "data stats": ["data/train.json", "--recipe", "run/recipe.yaml"],
    "data check": ["data/heldout.json"],
    "data show": ["--recipe", "run/recipe.yaml"],
    "data demo": ["--out", "demo", "--samples", "20", "--heldout", "4"],
    "data group": ["run/recipe.yaml"],
    "data task-file": ["run/recipe.yaml", "--out", "task"],
    "recipes": [],
    "recipes copy": ["demo"],
}
MORE = [
    ("plan", ["run/recipe.yaml", "--gpus", "1,2"]),
    ("plan", ["run/recipe.yaml", "--compare", "tp=1", "--explain"]),
    ("plan", ["--diff", "run", "run/plan.json"]),
    ("report", ["run/plan.json"]),
    ("simulate", ["run/recipe.yaml", "--plan", "run/plan.json", "--fault", "slow:1:2"]),
]
NEEDS_TRAIN = {
    "train": ["run/recipe.yaml"],
    "profile": ["run/recipe.yaml"],
    "verify": ["run/recipe.yaml"],
    "evaluate": ["run"],
    "chat": ["run"],
    "export": ["run", "--out", "exported"],
    "data latents": ["run/recipe.yaml"],
    "data tiny-model": ["llava", "--out", "tiny2"],
}
NEEDS_OTHERS = {
    "data digits": (["--source", "data", "--out", "digits"], "audio"),
    "data serve": (["run/recipe.yaml"], "serve"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run_dir: Path) -> Path:
    here = tmp_path_factory.mktemp("core")
    generate_demo(here / "data", seed=2, train=30, heldout=8)
    write_tiny_model(find_family_by_name("llava"), here / "tiny", 0)
    (here / "run").symlink_to(run_dir)
    (here / "other.yaml").write_text("num_train_epochs: 2")
    return here


def run_core(folder: Path, system: str, command: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    line = [sys.executable, "-m", "tests.core_process", system, *command.split(), *arguments]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("command", CORE)
def test_a_command_of_the_core_runs_without_torch_as_on_windows(folder: Path, command: str) -> None:
    done = run_core(folder, "windows", command, CORE[command])
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("command", "arguments"), MORE)
def test_its_options_do_too(folder: Path, command: str, arguments: list[str]) -> None:
    done = run_core(folder, "windows", command, arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_an_index_is_cached_as_on_windows(folder: Path) -> None:
    """Locks, drafts that are renamed and maps that are read: what a larger source adds to the small ones above."""
    turns = [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "It is a circle. " * 20}]
    lines = [json.dumps({"id": str(number), "conversations": turns}) for number in range(4000)]
    (folder / "large.jsonl").write_text("\n".join(lines), encoding="utf-8")
    source = ["--set", "data.sources.0.path=large.jsonl", "--set", "data.sources.0.format=llava"]
    arguments = ["--recipe", "run/recipe.yaml", *source]
    first = run_core(folder, "windows", "data stats", arguments)
    assert first.returncode == 0, first.stderr
    [index] = (folder / ".mmtrain-index").glob("*-1")
    written = {file.name: file.stat().st_mtime_ns for file in index.iterdir()}
    again = run_core(folder, "windows", "data stats", arguments)
    assert again.stdout == first.stdout
    assert written.items() <= {file.name: file.stat().st_mtime_ns for file in index.iterdir()}.items()


@pytest.mark.parametrize("command", NEEDS_TRAIN)
def test_a_command_that_needs_torch_names_the_extra(folder: Path, command: str) -> None:
    done = run_core(folder, "linux", command, NEEDS_TRAIN[command])
    assert done.returncode == 2
    assert done.stderr == (
        f"mmtrain: `mmtrain {command}` needs torch, megatron-core, einops and tensorboard, which are not installed "
        "here: pip install 'mmtrain[train]'\n"
    )


@pytest.mark.parametrize("command", NEEDS_OTHERS)
def test_a_command_that_needs_another_package_names_its_extra(folder: Path, command: str) -> None:
    arguments, extra = NEEDS_OTHERS[command]
    done = run_core(folder, "linux", command, arguments)
    assert done.returncode == 2
    assert f"`mmtrain {command}` needs " in done.stderr
    assert done.stderr.endswith(f"pip install 'mmtrain[{extra}]'\n")


def test_measuring_plans_names_the_extra_and_the_way_without(folder: Path) -> None:
    done = run_core(folder, "linux", "plan", ["run/recipe.yaml", "--measure"])
    assert done.returncode == 2
    assert done.stderr.endswith(
        "pip install 'mmtrain[train]', or leave out --measure, and plans are ranked by predicted times\n"
    )


def test_windows_trains_in_wsl(folder: Path) -> None:
    done = run_core(folder, "windows", "train", ["run/recipe.yaml"])
    assert done.returncode == 2
    assert done.stderr.startswith("mmtrain: `mmtrain train` starts processes by fork, which Python on ")
    assert "WSL" in done.stderr


def test_doctor_lists_for_each_command_what_it_needs(folder: Path) -> None:
    """Each command is here in one of the lists above, so that a new one is tried without torch or asks for it."""
    done = run_core(folder, "linux", "doctor", ["--json"])
    states = {state["command"]: state for state in json.loads(done.stdout)["commands"]}
    groups = {"recipes"}  # a group of commands that is one itself
    assert states.keys() | groups == {*CORE, *NEEDS_TRAIN, *NEEDS_OTHERS}
    assert {command for command, state in states.items() if state["is_ready"]} | groups == CORE.keys()
    assert {command for command, state in states.items() if state["needs"] == {"train": False}} == NEEDS_TRAIN.keys()
    text = run_core(folder, "linux", "doctor", []).stdout
    assert "train: not ready; needs train, not installed; does without transformers, serve, audio" in text
    assert "Backends" not in text


def unix_uses(path: Path) -> Iterator[str]:
    """Yield the modules and names in a source that Windows does not have."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from {name.partition(".")[0] for name in names} & {*UNIX_MODULES}
        elif isinstance(node, ast.Attribute) and node.attr in UNIX_NAMES.get(ast.unparse(node.value), ()):
            yield ast.unparse(node)


def test_one_module_calls_what_windows_does_not_have() -> None:
    """Of the code that the core runs. What prepares data in worker processes is for training alone."""
    package = ROOT / "mmtrain"
    files = [*package.glob("*.py"), *(path for room in WITHOUT_TORCH for path in (package / room).rglob("*.py"))]
    for_training = (package / "data" / "loading", package / "data" / "service")
    core = [path for path in files if not any(path.is_relative_to(folder) for folder in for_training)]
    assert len(core) > 300
    uses = {path.relative_to(package).as_posix(): set(unix_uses(path)) for path in core}
    calls = uses.pop("system_calls.py")
    assert "os.fork" in uses.pop("limited_reads.py"), "which calls none of it where `can_fork` returns False"
    assert {"fcntl", "resource", "os.sched_getaffinity", "os.posix_fallocate", "os.pread"} <= calls
    assert {path: names for path, names in uses.items() if names} == {}


def test_the_processes_hide_every_package_of_the_extras() -> None:
    from mmtrain.extras import EXTRAS

    assert {module for extra in EXTRAS for module in extra.modules} <= {*PACKAGES}
