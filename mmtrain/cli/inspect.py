"""`mmtrain inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson

if TYPE_CHECKING:
    from mmtrain.weights.inspect_folder import FolderSummary

_MAX_SHOWN_TENSORS = 5


def inspect(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="A folder in the layout of Hugging Face, or ORG/NAME of the hub.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say whether training can start from a model folder.

    Shows its family, units and weights, and the LLM tokens that images and sound cost. What is not supported, and every
    tensor that does not fit, is an error.
    """
    import json
    from dataclasses import asdict

    from mmtrain.families.hub_models import fetch_config, is_model_of_hub
    from mmtrain.weights.inspect_folder import inspect_folder

    is_of_hub = is_model_of_hub(folder)
    summary = inspect_folder(fetch_config(folder) if is_of_hub else Path(folder))
    typer.echo(json.dumps(asdict(summary)) if as_json else _text(summary, is_of_hub))


def _text(summary: "FolderSummary", is_of_hub: bool) -> str:
    uses = {
        "generator": "a recipe can start its generator from it (model.generator.hf)",
        "autoencoder": "a recipe can draw its latents (model.generator.vae)",
    }
    what = next((uses[unit.name] for unit in summary.units if unit.name in uses), None)
    is_of_diffusers = what is not None
    if summary.is_guest:
        what = "training can start from it (model.hf), with modules of transformers (docs/guests.md)"
    what = what or "training can start from it (model.hf)"
    lines = [f"{summary.folder}: {summary.family}, {what}"]
    for unit in summary.units:
        shape = f"{unit.layers} blocks, {unit.hidden} wide, {unit.heads} heads"
        lines.append(f"  {unit.name}: {unit.parameters:,} parameters, {shape}")
    if summary.media_tokens:
        costs = [f"{tokens:,.4g}" if tokens % 1 else f"{tokens:,.0f}" for tokens in summary.media_tokens.values()]
        media = zip(summary.media_tokens, costs, strict=True)
        lines.append("  LLM tokens: " + "; ".join(f"{medium} {cost}" for medium, cost in media))
    lines += [f"  {modality}: not built, export copies it; {why}" for modality, why in summary.not_built.items()]
    if summary.num_bytes is None:
        none = "on the hub; training fetches them" if is_of_hub else "none; it can be planned for, not trained from"
        lines.append(f"  weights: {none}")
    else:
        files = "1 file" if summary.files == 1 else f"{summary.files} files"
        dtypes = ", ".join(summary.dtypes or ())
        lines.append(
            f"  weights: {summary.num_bytes / 1e9:,.3g} GB in {files}, {dtypes}; {summary.tensors} tensors, all fit"
        )
    lines += _weight_notes(summary)
    if is_of_diffusers:
        return "\n".join(lines)
    found = [f"{what} in {file}" for what, file in summary.found_in.items() if file is not None]
    missing = [what for what, file in summary.found_in.items() if file is None]
    lines.append(f"  beside them: {', '.join(found) or 'nothing'}")
    if missing:
        lines.append(f"  not there: {', '.join(missing)}")
    lines += [f"  conversations: {problem}" for problem in summary.text_problems]
    return "\n".join(lines)


def _weight_notes(summary: "FolderSummary") -> list[str]:
    """Return what is unusual about the tensors of a folder."""
    notes = []
    if summary.has_own_head:
        notes.append(
            "  embeddings: not tied, whatever config.json says, because the files hold an output matrix of its own; "
            "export says so in config.json"
        )
    names = summary.tensors_passed_over
    if names:
        rest = f" and {len(names) - _MAX_SHOWN_TENSORS} more" if len(names) > _MAX_SHOWN_TENSORS else ""
        notes.append(f"  not read, because nothing needs them: {', '.join(names[:_MAX_SHOWN_TENSORS])}{rest}")
    return notes
