"""The extras of mmtrain: what `pip install mmtrain` leaves out, and which commands need it or can use it.

The core plans, simulates, reports and reads data, without torch. `pyproject.toml` names the versions.
"""

import importlib.util
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from mmtrain.errors import UserError
from mmtrain.system_calls import can_fork

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_DATA_READING_COMMANDS = (
    *("data stats", "data group", "data check", "data show", "data serve", "data task-file"),
    *("plan", "profile", "simulate", "report", "train", "evaluate", "chat"),
)
_TRAINING_COMMANDS = (
    *("train", "profile", "verify", "evaluate", "chat", "export"),
    *("data latents", "data tiny-model"),
)
FORKING_COMMANDS = ("train", "profile", "verify", "evaluate", "data serve")  # those that start processes


@dataclass(frozen=True)
class Extra:
    """An extra: the packages that `pip install 'mmtrain[NAME]'` adds."""

    name: str
    modules: Mapping[str, str]  # what is imported -> the package that has it
    purpose: str  # what needs it
    needed_by: tuple[str, ...] = ()  # commands that do nothing without it
    used_by: tuple[str, ...] = ()  # commands that do less without it

    @property
    def install(self) -> str:
        """Return the command that installs it."""
        return f"pip install 'mmtrain[{self.name}]'"

    @property
    def commands(self) -> tuple[str, ...]:
        """Return all commands that it concerns."""
        return (*self.needed_by, *self.used_by)

    def missing(self) -> list[str]:
        """Return its packages that are not installed; imports none of them."""
        return [package for module, package in self.modules.items() if not _is_installed(module)]


TRAIN = Extra(
    "train",
    {"torch": "torch", "megatron": "megatron-core", "einops": "einops", "tensorboard": "tensorboard"},
    "training, measuring, and all that reads weights",
    needed_by=_TRAINING_COMMANDS,
    used_by=("plan",),  # --measure
)
SERVE = Extra(
    "serve",
    {"zmq": "pyzmq"},
    "producers on other machines (data.producers)",
    needed_by=("data serve",),
    used_by=("train",),
)
HUB = Extra(
    "hf",
    {"huggingface_hub": "huggingface-hub"},
    "models that are named as on the hub, and exports to it",
    used_by=("inspect", "plan", "simulate", "report", "train", "profile", "chat", "export"),
)
GUESTS = Extra(
    "transformers",
    {"transformers": "transformers"},
    "models that no family covers (guests)",
    used_by=("plan", "simulate", "report", "train", "export", "inspect"),
)
EXTRAS = (
    TRAIN,
    GUESTS,
    SERVE,
    Extra(
        "audio",
        {"soundfile": "soundfile"},
        "recipes with an audio encoder",
        needed_by=("data digits",),
        used_by=_DATA_READING_COMMANDS,
    ),
    Extra("video", {"av": "av"}, "samples with videos", used_by=_DATA_READING_COMMANDS),
    Extra("heif", {"pillow_heif": "pillow-heif"}, "HEIC and HEIF images", used_by=_DATA_READING_COMMANDS),
    Extra("parquet", {"pyarrow": "pyarrow"}, "sources in Parquet", used_by=_DATA_READING_COMMANDS),
    Extra(
        "remote",
        {"fsspec": "fsspec", "aiohttp": "aiohttp"},
        "sources on servers (URLs), checkpoints and exports in object stores",
        used_by=(*_DATA_READING_COMMANDS, "export"),
    ),
    HUB,
    Extra("report", {"matplotlib": "matplotlib"}, "pictures (--png)", used_by=("report", "data stats")),
    Extra("wandb", {"wandb": "wandb"}, "a tracker: Weights & Biases", used_by=("train",)),
    Extra("mlflow", {"mlflow": "mlflow-skinny"}, "a tracker: MLflow", used_by=("train",)),
    Extra("trackio", {"trackio": "trackio"}, "a tracker: Trackio", used_by=("train",)),
    Extra("notebook", {"pandas": "pandas"}, "frames of the Python API (`to_frame`)"),
)


@dataclass(frozen=True)
class CommandState:
    """What a command needs and can use, and whether that is installed."""

    command: str
    is_ready: bool
    needs: dict[str, bool]  # extra -> whether all its packages are installed
    uses: dict[str, bool]
    problem: str | None = None  # why it does not run on this system, whatever is installed


def command_state(command: str) -> CommandState:
    """Find what a command needs and can use, and whether that is installed."""
    needs = {extra.name: not extra.missing() for extra in EXTRAS if command in extra.needed_by}
    uses = {extra.name: not extra.missing() for extra in EXTRAS if command in extra.used_by}
    problem = _fork_problem() if command in FORKING_COMMANDS else None
    return CommandState(command, all(needs.values()) and problem is None, needs, uses, problem)


def require_extra(extra: Extra, what: str, otherwise: str = "") -> None:
    """Raise UserError if packages of an extra are not installed.

    what: needs them, such as a command. otherwise: what the user can do without them.
    """
    missing = extra.missing()
    if missing:
        remedy = f"{extra.install}{f', or {otherwise}' if otherwise else ''}"
        verb = "is" if len(missing) == 1 else "are"
        raise UserError(f"{what} needs {listed(missing)}, which {verb} not installed here: {remedy}")


def needing_packages(command: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Decorate what runs a command, so that it raises UserError where packages or the system do not let it run.

    Without that it would fail at whichever import comes first, after some of its work.
    """

    def decorate(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @wraps(run)
        def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            if command in FORKING_COMMANDS:
                require_forks(command)
            for extra in EXTRAS:
                if command in extra.needed_by:
                    require_extra(extra, f"`mmtrain {command}`")
            return run(*args, **kwargs)

        return checked

    return decorate


def require_forks(command: str) -> None:
    """Raise UserError on Windows, for a command that starts processes."""
    problem = _fork_problem()
    if problem is not None:
        raise UserError(f"`mmtrain {command}` {problem}")


def _fork_problem() -> str | None:
    if can_fork():
        return None
    return (
        f"starts processes by fork, which Python on {platform.system()} does not have here: run it on Linux, or in the "
        "Windows Subsystem for Linux (WSL)"
    )


def listed(words: Sequence[str]) -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a package that is hidden, or without a specification
        return False
