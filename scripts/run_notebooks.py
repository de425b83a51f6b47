"""Run the notebooks of the documentation and save them with their outputs: `python -m scripts.run_notebooks`.

Each runs in an empty folder, as after `pip install`. Nothing of the machine stays in a saved notebook: no paths, no
times of cells, no identifiers of the kernel.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_S = 600
KEPT_METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def run_notebook(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Run a notebook in `folder`; return it with its outputs. Raises nbclient's CellExecutionError."""
    notebook = nbformat.read(path, as_version=4)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        client = NotebookClient(
            notebook, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        return client.execute()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def without_machine(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Remove from a notebook's outputs what another machine, or another run, would not have."""
    notebook.metadata = nbformat.from_dict(KEPT_METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", ()):
            output.pop("metadata", None)
            if output.output_type in ("display_data", "execute_result"):
                output.metadata = nbformat.from_dict({})
            if "text" in output:
                output.text = relative_paths(output.text, folder)
            for kind, text in output.get("data", {}).items():
                output.data[kind] = relative_paths(text, folder)
        merge_streams(cell)
    return notebook


def relative_paths(text: str, folder: Path) -> str:
    """Write paths as they are in the folder that a notebook ran in; drop colors, and lines that were redrawn."""
    for start in {str(folder), str(folder.resolve())}:
        text = text.replace(f"{start}/", "")
    return re.sub(r"(?m)^.*\r|\x1b\[[0-9;]*m", "", text)


def merge_streams(cell: nbformat.NotebookNode) -> None:
    """Join the pieces in which a stream arrived, which differ from run to run."""
    merged: list[nbformat.NotebookNode] = []
    for output in cell.get("outputs", ()):
        last = merged[-1] if merged else None
        if last is not None and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(output)
    if "outputs" in cell:
        cell.outputs = merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS)
    for path in parser.parse_args().notebooks:
        with tempfile.TemporaryDirectory() as folder:
            notebook = without_machine(run_notebook(path, Path(folder)), Path(folder))
        nbformat.write(notebook, path)
        print(f"{path} written")


if __name__ == "__main__":
    main()
