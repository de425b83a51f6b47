"""How many of our own functions lie between a command and the work that it is there for."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import mmtrain
from mmtrain.cli.app import app
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.models.stage.vision_layers import PatchEmbed
from mmtrain.planning.evaluate import layout_simulation
from tests.distributed import fork_ranks
from tests.flow.runs import RECIPE as DEMO_RECIPE
from tests.flow.runs import SMALL

PACKAGE = Path(mmtrain.__file__).parent
RECIPE = PACKAGE.parent / "recipes/whatif/optimus_14b.yaml"
MAX_FRAMES = 14  # with the function of the command, and with the end of the walk
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
        frames.extend(frames or frames_from(start, sys._getframe(1)))
        raise ArrivedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, end, arrive)
        with suppress(ArrivedError):
            run()
    assert frames, f"{end} was never called"
    return [*frames, end]


def frames_from(start: str, last: FrameType) -> list[str]:
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
    assert len(frames) <= MAX_FRAMES, "\n".join(frames)


def _walk_of_training(rank: int, world_size: int, folder: Path, data: Path) -> list[str]:
    """Train one step with one rank in this process; return the frames of the first layer's forward."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    walks: list[list[str]] = []
    forward = PatchEmbed.forward

    def noting_forward(layer: nn.Module, *args: object) -> object:
        walks.append([*frames_from("cli/train.py", sys._getframe(1)), "models/stage/vision_layers.py:forward"])
        return forward(layer, *args)  # type: ignore[arg-type]

    PatchEmbed.forward = noting_forward  # type: ignore[method-assign, assignment]
    settings = [
        f"data.sources.0.path={data}/train.json",
        f"data.tokenizer={data}/tokenizer.json",
        *SMALL,
        f"data.validation.0.path={data}/heldout.json",
        "train.steps=1",
        "cluster.ranks=1",
        "parallel.placement=unified",
    ]
    arguments = [part for value in settings for part in ("--set", value)]
    app(["train", str(DEMO_RECIPE), "--run-dir", str(folder / "run"), *arguments], standalone_mode=False)
    return walks[0]


def test_the_walk_from_the_command_train_to_the_first_layer(tmp_path: Path) -> None:
    data = tmp_path / "data"
    generate_demo(data, seed=3, train=16, heldout=4)
    [walk_of_rank] = fork_ranks(1, _walk_of_training, data)
    assert len(walk_of_rank) <= MAX_FRAMES, "\n".join(walk_of_rank)
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    positions = [page.find("`mmtrain/{}` | `{}`".format(*frame.split(":"))) for frame in walk_of_rank]
    assert -1 not in positions, "docs/architecture.md lists every frame"
    assert positions == sorted(positions)
