"""Whoever follows docs/tutorial.md gets what the page shows: its files, its commands, and what they print."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mmtrain.recipe import load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
FOLDER_ON_PAGE = "/home/you/tutorial"
WIDTH_OF_PAGE = "110"
LEFT_OUT = "..."  # a line of the page that stands for any lines
RECIPE = "recipe.yaml"
MOST_FIRST_LOSS, MOST_LAST_LOSS = 8.0, 0.3  # the page shows 6.1 and 0.03
LEAST_SHARE_RIGHT = 0.85  # the page shows 0.96
FIGURE = re.compile(r"\d[\d.,:]*(e-\d+)?[kMG]?( m?s\b|%)?")
# What these print depends on the speed of the machine, or on how its kernels round.
MEASURING = {"train", "evaluate"}


@dataclass(frozen=True)
class ShownCommand:
    """A command of the page, and what the page shows below it."""

    words: tuple[str, ...]
    shown: tuple[str, ...]

    @property
    def argv(self) -> list[str]:
        """The command in the Python that runs the tests."""
        program, *arguments = self.words
        return [sys.executable, *(["-m", "mmtrain"] if program == "mmtrain" else []), *arguments]

    @property
    def is_rejected(self) -> bool:
        """Whether the page shows that mmtrain refuses the command."""
        return bool(self.shown) and self.shown[0].startswith("mmtrain: ")


@dataclass(frozen=True)
class ShownFile:
    """A file that the reader saves: its block starts with its name in a comment."""

    name: str
    text: str


def blocks() -> Iterator[list[str]]:
    """Yield the indented blocks of the page, without indentation; those of a list are indented by six."""
    block: list[str] = []
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), "end"]:
        if line.startswith("    ") or (not line and block):
            block.append(line)
        elif block:
            indentation = len(block[0]) - len(block[0].lstrip())
            yield [line[indentation:] for line in "\n".join(block).rstrip().splitlines()]
            block = []


def shown_steps() -> list[ShownCommand | ShownFile]:
    """Return what the page makes its reader save and run, in order."""
    steps: list[ShownCommand | ShownFile] = []
    for block in blocks():
        name = re.match(r"# ([\w.]+)", block[0])
        if name:
            steps.append(ShownFile(name[1], "\n".join(block) + "\n"))
        _, *commands = re.split(r"^\$ ", "\n".join(block), flags=re.MULTILINE)
        for command in commands:
            line, *shown = command.rstrip().splitlines()
            steps.append(ShownCommand(tuple(shlex.split(line)), tuple(shown)))
    return steps


def one_block_with(start: str) -> str:
    """Return the only block of the page that starts so."""
    [text] = [text for text in map("\n".join, blocks()) if text.startswith(start)]
    return text


def run(command: ShownCommand, folder: Path) -> list[str]:
    """Run the command in a process of its own; return what it printed, as the page writes it."""
    environment = os.environ | {"COLUMNS": WIDTH_OF_PAGE, "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command.argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == command.is_rejected, f"{shlex.join(command.words)}\n{done.stdout}{done.stderr}"
    printed = done.stderr if command.is_rejected else done.stdout
    return [line.rstrip() for line in printed.replace(str(folder), FOLDER_ON_PAGE).rstrip().splitlines()]


def without_figures(line: str) -> str:
    """Replace figures, and the spaces and rules whose number depends on them."""
    return re.sub(r"[ ━─]+", " ", FIGURE.sub("#", line))


def assert_prints(command: ShownCommand, printed: list[str]) -> None:
    """Assert that the shown lines are the printed ones; if the page leaves lines out, that they are among them."""
    shown, lines = list(command.shown), printed
    if command.words[1] in MEASURING:
        shown, lines = [without_figures(line) for line in shown], [without_figures(line) for line in lines]
    if LEFT_OUT not in shown:
        assert lines == shown
        return
    remaining = iter(lines)
    missing = [line for line in shown if line != LEFT_OUT and line not in remaining]
    assert missing == [], "\n".join([*command.words, *printed])


def follow(steps: Iterable[ShownCommand | ShownFile], folder: Path) -> None:
    """Save and run what the page shows, and assert that commands print what it shows."""
    for step in steps:
        if isinstance(step, ShownFile):
            (folder / step.name).write_text(step.text, encoding="utf-8")
            continue
        printed = run(step, folder)
        if step.shown:
            assert_prints(step, printed)


def _is_training(step: ShownCommand | ShownFile) -> bool:
    return isinstance(step, ShownCommand) and step.words[:2] == ("mmtrain", "train")


def test_the_page_says_what_to_save_and_to_run_in_an_order_that_works() -> None:
    files = {RECIPE: 0}
    for step in shown_steps():
        if isinstance(step, ShownFile):
            files[step.name] = files.get(step.name, 0) + 1
            assert yaml.safe_load(step.text) if step.name == RECIPE else compile(step.text, step.name, "exec")
        elif step.words[0] == "python":
            assert step.words[1] in files
        elif RECIPE in step.words:
            assert step.is_rejected == (files[RECIPE] == 1), "the first recipe is unfinished"
    assert files == {RECIPE: 2, "make_pictures.py": 1, "ask.py": 1}
    shown = [step.words[1] for step in shown_steps() if isinstance(step, ShownCommand) and step.words[0] == "mmtrain"]
    assert {"data", "inspect", "plan", "train", "report", "evaluate", "export"} <= set(shown)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return an empty folder with a name about as short as the page's, so that lines break where they do there."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print_until_training(folder: Path) -> None:
    steps = list(itertools.takewhile(lambda step: not _is_training(step), shown_steps()))
    follow(steps, folder)
    assert "plan" in [step.words[1] for step in steps if isinstance(step, ShownCommand)]


@pytest.mark.long
@pytest.mark.timeout(2400)  # trains for 300 steps, which takes a minute or two on two idle cores
def test_the_page_shows_what_its_commands_print(folder: Path) -> None:
    """Follow the page in an empty folder: the loss falls, and the model answers held-out questions."""
    follow(shown_steps(), folder)
    rows = json.loads((folder / "shapes/train.json").read_text(encoding="utf-8"))
    assert json.loads(one_block_with("{")) == rows[0]
    losses = [json.loads(line)["loss"] for line in (folder / "runs/shapes/metrics.jsonl").read_text().splitlines()]
    assert MOST_FIRST_LOSS > losses[0] > 10 * MOST_LAST_LOSS
    assert losses[-1] < MOST_LAST_LOSS
    scored = json.loads("\n".join(run(ShownCommand(("mmtrain", "evaluate", "runs/shapes", "--json"), ()), folder)))
    assert scored["exact"] > LEAST_SHARE_RIGHT
    assert scored["baseline"] == 0.28
    _assert_the_real_recipe_loads(folder)


def _assert_the_real_recipe_loads(folder: Path) -> None:
    """Assert that what the page changes for a real model are settings; the tiny model stands in for its folder."""
    changes = yaml.safe_load(one_block_with("model:\n  hf: llava-hf/"))
    changes["model"]["hf"] = "tiny"
    (folder / "real.yaml").write_text(yaml.safe_dump({"extends": RECIPE, **changes}), encoding="utf-8")
    assert load_recipe(folder / "real.yaml", []).recipe.train.steps == changes["train"]["steps"]
