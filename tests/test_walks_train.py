"""From the command `train` to the first layer's forward lie few functions of ours: a reader can walk all of them."""

import os
import sys
from pathlib import Path

from torch import nn

import mmtrain
from mmtrain.cli.app import app
from mmtrain.models.stage.vision_layers import PatchEmbed
from tests.distributed import fork_ranks
from tests.flow.runs import RECIPE, SMALL

MAX_FRAMES = 14  # with the function of the command, and with the layer's forward
PACKAGE = Path(mmtrain.__file__).parent


def frames_of_ours() -> list[str]:
    """Return the functions of the package that are running, the outermost first, like `cli/train.py train`."""
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            frames.append(f"{path.relative_to(PACKAGE)} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return frames[::-1]


def _walk(rank: int, world_size: int, folder: Path, data: Path) -> list[str]:
    """Train one step with one rank in this process; return the frames of the first layer's forward."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    walks: list[list[str]] = []
    forward = PatchEmbed.forward

    def noting_forward(layer: nn.Module, *args: object) -> object:
        walks.append([*frames_of_ours(), "models/stage/vision_layers.py forward"])
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
    app(["train", str(RECIPE), "--run-dir", str(folder / "run"), *arguments], standalone_mode=False)
    return walks[0]


def test_the_walk_from_the_command_train_to_the_first_layer(tmp_path: Path) -> None:
    from mmtrain.data.synthetic.demo import generate_demo

    data = tmp_path / "data"
    generate_demo(data, seed=3, train=16, heldout=4)
    [frames] = fork_ranks(1, _walk, data)
    start = frames.index("cli/train.py train")
    walk = frames[start:]
    assert len(walk) <= MAX_FRAMES, "\n".join(walk)
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    positions = [page.find("`mmtrain/{}` | `{}`".format(*frame.split())) for frame in walk]
    assert -1 not in positions, "docs/architecture.md lists every frame"
    assert positions == sorted(positions)
