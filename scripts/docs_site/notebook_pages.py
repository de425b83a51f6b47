"""Write a notebook with its outputs as a page."""

import re
from pathlib import Path

import nbformat


def notebook_markdown(path: Path) -> str:
    """Return the cells of a notebook as Markdown: code in fences, pictures and tables as HTML, text in fences."""
    notebook = nbformat.read(path, as_version=4)
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: nbformat.NotebookNode) -> str:
    html = output.get("data", {}).get("text/html")
    if html is not None:
        # One block of HTML ends at a blank line, so there is none.
        return '<div class="notebook-output">' + re.sub(r"\n\s*\n", "\n", html) + "</div>"
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
