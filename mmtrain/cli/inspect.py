"""`mmtrain inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson

if TYPE_CHECKING:
    from mmtrain.weights.inspect_folder import FolderSummary


def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder in the layout of Hugging Face.")],
    as_json: AsJson = False,
) -> None:
    """Say whether training can start from a model folder.

    Shows its family, units and weights. What is not supported, and every tensor that does not fit, is an error.
    """
    import json
    from dataclasses import asdict

    from mmtrain.weights.inspect_folder import inspect_folder

    summary = inspect_folder(folder)
    typer.echo(json.dumps(asdict(summary)) if as_json else _text(summary))


def _text(summary: "FolderSummary") -> str:
    from mmtrain.weights.inspect_folder import TEXT_FILES

    lines = [f"{summary.folder}: {summary.family}, training can start from it (model.hf)"]
    for unit in summary.units:
        shape = f"{unit.layers} blocks, {unit.hidden} wide, {unit.heads} heads"
        lines.append(f"  {unit.name}: {unit.parameters:,} parameters, {shape}")
    if summary.num_bytes is None:
        lines.append("  weights: none; such a folder can be planned for, not trained from")
    else:
        files = "1 file" if summary.files == 1 else f"{summary.files} files"
        dtypes = ", ".join(summary.dtypes or ())
        lines.append(
            f"  weights: {summary.num_bytes / 1e9:,.3g} GB in {files}, {dtypes}; {summary.tensors} tensors, all fit"
        )
    missing = [name for name in TEXT_FILES if name not in summary.text_files]
    lines.append(f"  beside them: {', '.join(summary.text_files) or 'nothing'}")
    if missing:
        lines.append(f"  not there: {', '.join(missing)}")
    lines += [f"  conversations: {problem}" for problem in summary.text_problems]
    return "\n".join(lines)
