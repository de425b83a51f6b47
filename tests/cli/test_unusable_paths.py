"""A path that a user names may be unusable: each command says which one and why in one message, and exits with 2."""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from typer.main import get_command

from mmtrain.cli import app as table
from mmtrain.data.synthetic.demo import generate_demo
from tests.cli.conftest import DEMO, RunMmtrain

# Arguments of each command. `{path}` stands for the path that cannot be used, `{demo}` for the demo recipe.
COMMANDS = {
    "plan": [
        ["{path}"],
        ["{demo}", "--out", "{path}"],
    ],
    "train": [["{path}"], ["{demo}", "--run-dir", "{path}"], ["{demo}", "--plan", "{path}"]],
    "profile": [["{path}"], ["{demo}", "--out", "{path}"]],
    "simulate": [
        ["{path}"],
        ["{demo}", "--plan", "{path}"],
        ["{demo}", "--against", "{path}"],
        ["{demo}", "--out", "{path}"],
    ],
    "verify": [["{path}"], ["{demo}", "--plan", "{path}"]],
    "report": [["{path}"], ["{demo}", "--plan", "{path}"], ["{demo}", "--out", "{path}"]],
    "evaluate": [["{path}"], ["run", "--out", "{path}"]],
    "export": [["{path}", "--out", "exported"], ["run", "--out", "{path}"]],
    "inspect": [["{path}"]],
    "chat": [["{path}"]],
    "recipes copy": [["demo", "--out", "{path}"]],
    "launch kubernetes": [
        ["{path}", "--plan", "plan.json", "--image", "ours", "--claim", "shared"],
        ["{demo}", "--plan", "{path}", "--image", "ours", "--claim", "shared"],
    ],
    "launch skypilot": [["{path}", "--plan", "plan.json"], ["{demo}", "--plan", "{path}"]],
    "launch ray": [["{path}", "--plan", "plan.json"], ["{demo}", "--plan", "{path}"]],
    "launch slurm": [["{path}", "--plan", "plan.json"], ["{demo}", "--plan", "{path}"]],
    "init": [
        ["--model", "{path}", "--data", "{data}/train.json", "--out", "new.yaml"],
        ["--model", "{data}", "--data", "{path}", "--out", "new.yaml"],
    ],
    "schema": [],
    "convert-config": [["{path}"]],
    "doctor": [["--no-links", "--run-dir", "{path}"]],
    "data stats": [["{path}"], ["--recipe", "{path}"], ["{data}/train.json", "--png", "{path}.png"]],
    "data group": [["{path}"]],
    "data serve": [["{path}"]],
    "data check": [["{path}"], ["--recipe", "{path}"]],
    "data show": [["--recipe", "{path}"]],
    "data latents": [["{path}"]],
    "data task-file": [["{path}", "--out", "task"], ["{demo}", "--out", "{path}"]],
    "data tiny-model": [["llava", "--out", "{path}"]],
    "data demo": [["--out", "{path}", "--samples", "4", "--heldout", "1"]],
    "data digits": [["--source", "{path}", "--out", "digits"], ["--source", ".", "--out", "{path}"]],
}
# Without `data.index_cache`, which a run can do without, and `data.producer_secret`, which this one does not use.
SETTINGS = [
    "data.sources.0.path",
    "data.sources.0.image_root",
    "data.validation.0.path",
    "data.tokenizer",
    "model.hf",
    "cluster.costs",
    "train.init_from",
    "run_dir",
]
# What only looks at the path: `doctor` says in its report that no runs can be written there.
READ_ONLY_LOOKS = {("doctor", kind) for kind in ("below_a_file", "loop", "too_long", "unreadable")}
Call = tuple[str, list[str]]  # a command and its arguments
PLACES: dict[str, Callable[[Path], Path]] = {}


def place(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """Enter a kind of unusable path."""
    PLACES[make.__name__] = make
    return make


@place
def sealed(folder: Path) -> Path:
    """Return a path in a folder that the user may not search."""
    closed = folder / "closed"
    closed.mkdir()
    (closed / "inner").mkdir()
    closed.chmod(0)
    return closed / "inner" / "it.json"


@place
def below_a_file(folder: Path) -> Path:
    """Return a path whose parent is a file."""
    (folder / "file").write_text("text")
    return folder / "file" / "it.json"


@place
def too_long(folder: Path) -> Path:
    """Return a path with a name that no file system takes."""
    return folder / ("long" * 80) / "it.json"


@place
def loop(folder: Path) -> Path:
    """Return a path through a link to itself."""
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop" / "it.json"


@place
def unreadable(folder: Path) -> Path:
    """Return a file that the user may not read, and whose folder takes no files."""
    closed = folder / "read-only"
    closed.mkdir()
    (closed / "it.json").write_text("[]")
    (closed / "it.json").chmod(0)
    closed.chmod(0o500)
    return closed / "it.json"


@contextmanager
def as_other_user() -> Iterator[None]:
    """Take from this thread what lets root read and write everything, as any other user."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Capabilities(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))

    libc = ctypes.CDLL(None, use_errno=True)
    header = Header(0x20080522, 0)
    before = (Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), before) == 0
    without = (Capabilities * 2)(*before)
    without[0].effective &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(ctypes.byref(header), without) == 0
    try:
        yield
    finally:
        assert libc.capset(ctypes.byref(header), before) == 0


def commands(group: object, name: str = "") -> Iterator[str]:
    """Yield the name of every command."""
    inner = getattr(group, "commands", None)
    if inner is None:
        yield name.strip()
        return
    for part, command in inner.items():
        yield from commands(command, f"{name} {part}")


def test_every_command_is_here() -> None:
    assert set(commands(get_command(table.app))) == set(COMMANDS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    generate_demo(folder, seed=1, train=20, heldout=40)
    return folder


def demo_settings(data: Path) -> list[str]:
    """Return arguments that train the demo on `data` for a step."""
    settings = [f"data.sources.0.path={data}/train.json", f"data.tokenizer={data}/tokenizer.json"]
    settings += [f"data.validation.0.path={data}/heldout.json", "train.steps=1"]
    return [part for setting in settings for part in ("--set", setting)]


def command_calls() -> Iterator[Call]:
    """Yield each command with each of its arguments that name a path, but for those beside a recipe."""
    for command, variants in COMMANDS.items():
        yield from ((command, arguments) for arguments in variants if "{demo}" not in arguments)


def demo_calls(data: Path) -> Iterator[Call]:
    """Yield each command with each of its arguments that name a path beside a recipe."""
    for command, variants in COMMANDS.items():
        for arguments in variants:
            if "{demo}" in arguments:
                yield command, [str(DEMO), *arguments[1:], *demo_settings(data)]


def setting_calls(data: Path) -> Iterator[Call]:
    """Yield `train` with each setting that names a path."""
    for setting in SETTINGS:
        yield "train", [str(DEMO), *demo_settings(data), "--set", f"{setting}={{path}}"]


def explain_wrong(run_mmtrain: RunMmtrain, data: Path, folder: Path, kind: str, calls: Iterable[Call]) -> list[str]:
    """Run commands on one unusable path; return those that do not end with one message and exit code 2."""
    path = PLACES[kind](folder)
    wrong = []
    for command, template in calls:
        arguments = [part.replace("{path}", str(path)).replace("{data}", str(data)) for part in template]
        shown = f"{command} {template[0]} ... {template[-1]}"
        try:
            with as_other_user():
                result = run_mmtrain(*command.split(), *arguments)
        except Exception as error:
            wrong.append(f"{shown}: {error!r}")
        else:
            is_right = result.returncode == 2 and "mmtrain: " in result.stderr and "Traceback" not in result.stderr
            if not is_right and (command, kind) not in READ_ONLY_LOOKS:
                wrong.append(f"{shown}: {result.returncode}: {result.stderr[-300:]}")
    return wrong


def test_commands_name_a_path_that_they_may_not_search(
    run_mmtrain: RunMmtrain, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not explain_wrong(run_mmtrain, data, tmp_path, "sealed", command_calls())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "sealed" else pytest.mark.long) for kind in PLACES]
)
def test_commands_and_settings_name_a_path_that_cannot_be_used(
    run_mmtrain: RunMmtrain, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = chain(command_calls(), demo_calls(data), setting_calls(data))
    assert not explain_wrong(run_mmtrain, data, tmp_path, kind, calls)
