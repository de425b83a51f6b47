"""Every command in the documentation is accepted by the command line, and names files that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from mmtrain.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *sorted(ROOT.glob("recipes/**/*.yaml")),
]
MADE_BY_USERS = {"recipes/mine.yaml", "recipe.yaml"}


def commands() -> list[str]:
    """Collect the commands in code lines, from `mmtrain` on and without the comment."""
    lines = []
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            shown = re.match(r"(?:#? {4,}(?:\$ )?|.*-m )\b(?:\S+ )*?(mmtrain .+?)(?:\s+#.*)?$", line)
            if shown and "import mmtrain" not in line:
                lines.append(shown[1])
    return sorted(set(lines))


def test_there_are_commands_in_the_documentation() -> None:
    assert len(commands()) > 40


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_is_accepted(line: str) -> None:
    _, *words = shlex.split(line)
    command = get_command(app)
    while hasattr(command, "commands") and words:
        command = command.commands[words.pop(0)]
    context = command.make_context(command.name or "", words)
    recipe = context.params.get("recipe")
    if isinstance(recipe, Path) and str(recipe) not in MADE_BY_USERS:
        assert (ROOT / recipe).is_file()


def shown_plan(page: str) -> tuple[list[str], str]:
    """Return the arguments of the first `mmtrain` whose output a page shows, and what follows on the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    command, _, shown = text.partition("    $ mmtrain ")[2].partition("\n")
    return shlex.split(command), shown


def as_shown(output: str) -> str:
    """Return an output as pages show it."""
    return "\n".join(f"    {line.rstrip()}".rstrip() for line in output.rstrip().splitlines())


@pytest.mark.slow
def test_the_page_on_planning_shows_what_plan_prints() -> None:
    """That of the README is printed in `tests/test_packaging.py`, by a wheel without torch."""
    arguments, shown = shown_plan("docs/planning.md")
    done = subprocess.run(
        [sys.executable, "-m", "mmtrain", *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "110"},
    )
    assert shown.startswith(as_shown(done.stdout))
