"""The notebooks of the documentation run as they are, and are saved with outputs of no particular machine."""

import re
from pathlib import Path

import nbformat
import pytest

from scripts.run_notebooks import NOTEBOOKS, run_notebook, without_machine

PLANNING = next(path for path in NOTEBOOKS if path.stem == "planning_a_cluster")
# Folders of machines, and what a program prints of an error.
OF_A_MACHINE = re.compile(
    r"/(?:tmp|root|home|work|Users|private|var|opt|usr)/|[A-Z]:\\\\|Traceback|site-packages|\x1b\["
)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def plain_texts(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what each output is as text: of a picture the line that stands for it."""
    return [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs(notebook)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_as_it_ran_without_its_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == [*range(1, len(counts) + 1)], "run it from top to bottom: python -m scripts.run_notebooks"
    assert any("<svg" in output.get("data", {}).get("text/html", "") for output in outputs(notebook))
    assert [text for text in map(str, outputs(notebook)) if OF_A_MACHINE.search(text)] == []
    assert [output for output in outputs(notebook) if output.output_type == "error"] == []


@pytest.mark.slow
def test_the_planning_notebook_shows_what_is_planned_today(tmp_path: Path) -> None:
    saved = nbformat.read(PLANNING, as_version=4)
    fresh = without_machine(run_notebook(PLANNING, tmp_path), tmp_path)
    assert plain_texts(fresh) == plain_texts(saved), "if this is meant: python -m scripts.run_notebooks"


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path != PLANNING], ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = run_notebook(path, tmp_path)
    assert [output for output in outputs(notebook) if output.output_type == "error"] == []
    assert len(outputs(notebook)) >= len(outputs(nbformat.read(path, as_version=4))) - 1
