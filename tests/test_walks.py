"""How many of our own functions lie between a command and the work that it is there for."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

import mmtrain
from mmtrain.cli.app import app
from mmtrain.planning.evaluate import layout_simulation

PACKAGE = Path(mmtrain.__file__).parent
RECIPE = PACKAGE.parent / "recipes/whatif/optimus_14b.yaml"
MAX_FRAMES_OF_PLAN = 14
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # Python 3.12 has no frames for most of them


class ArrivedError(BaseException):
    """Ends a command where its walk ends; handlers of `Exception` let it pass."""


def walk(run: Callable[[], object], start: str, owner: object, end: str) -> list[str]:
    """Run a command until it first calls the function `end`; return the frames of this package on the way.

    They are named like `cli/plan.py:plan`: first the outermost one of the file `start`, then down to the caller of
    `end`, and `end` itself last.

    Args:
        run: runs the command, in this thread; it may catch what stops it.
        start: a file below the package.
        owner: the module or class in which callers look `end` up.
        end: name of the function.
    """
    frames: list[str] = []

    def arrive(*_: Any, **__: Any) -> None:
        frames.extend(frames or _frames_from(start, sys._getframe(1)))
        raise ArrivedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, end, arrive)
        with suppress(ArrivedError):
            run()
    assert frames, f"{end} was never called"
    return [*frames, end]


def _frames_from(start: str, last: FrameType) -> list[str]:
    """Return our frames from the outermost one of the file `start` to `last`."""
    names: list[str] = []
    frame: FrameType | None = last
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(f"{PACKAGE}/") and code.co_name not in COMPREHENSIONS:
            names.append(f"{code.co_filename.removeprefix(f'{PACKAGE}/')}:{code.co_name}")
        frame = frame.f_back
    names.reverse()
    first = next(i for i, name in enumerate(names) if name.startswith(f"{start}:"))
    return names[first:]


def test_planning_walks_straight_to_the_first_simulated_step() -> None:
    frames = walk(
        lambda: CliRunner().invoke(app, ["plan", str(RECIPE)], catch_exceptions=False),
        "cli/plan.py",
        layout_simulation,
        "simulate",
    )
    assert len(frames) <= MAX_FRAMES_OF_PLAN, "\n".join(frames)
