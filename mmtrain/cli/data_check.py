"""`mmtrain data check`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.counting_bar import counting_bar
from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.data.index.data_check import CheckReport

MAX_EXAMPLES_PER_REASON = 3  # bad samples that are printed for each reason
_PLURALS = {"image": "images", "video": "videos", "audio": "clips", "target image": "images to draw"}


def check(
    overrides: Overrides,
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE...", help="Files or URLs. Default with --recipe: its sources.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Preprocess as this recipe does and apply its limits.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all bad samples, one JSON object a line: source, index, id, kind and reason."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Decode every sample, count those that cannot be used, and show some of each kind. `--out` lists all.

    It does not wait for storage that is away: what it cannot read there counts as bad.

    Exits with 1 if the share of bad samples is above the recipe's data.max_bad_rate (without a recipe: 1 in 100).
    """
    import json
    from dataclasses import asdict

    from mmtrain.api.recipe_index import print_note, read_named_sources, sources_for_recipe
    from mmtrain.cli.options import require_writable
    from mmtrain.data import write_quarantine
    from mmtrain.data.index.data_check import check_sources, check_sources_for_recipe
    from mmtrain.errors import UserError, writing
    from mmtrain.recipe import load_recipe

    settings = None if recipe is None else load_recipe(recipe, overrides).recipe
    named_sources = (
        read_named_sources(sources or []) if settings is None else sources_for_recipe(sources or [], settings)
    )
    if settings is None and not named_sources:
        raise UserError("nothing to check: name data files, or a recipe with --recipe")
    if out is not None:
        require_writable("--out", out, "list of bad samples")
    with counting_bar("decoding", "decoded") as show_progress:
        if settings is not None:
            report = check_sources_for_recipe(settings, named_sources, show_progress, print_note)
        else:
            report = check_sources(named_sources, show_progress, print_note)
    if out is not None:
        with writing("--out", out, "list of bad samples"):
            write_quarantine(out, report.bad)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "kinds": report.kinds, "passed": report.passed}))
    else:
        typer.echo(check_text(report))
    if not report.passed:
        raise typer.Exit(1)


def check_text(report: "CheckReport") -> str:
    """Write the report as lines: the counts, then each reason with its first examples."""
    from mmtrain.data.formats.sample import QUARANTINE_REASONS, one_per_reason

    media = ", ".join(f"{_PLURALS[kind]} {count}" for kind, count in report.media.items()) or "no media"
    sound = f" ({report.seconds_of_sound:.0f} s of audio)" if report.seconds_of_sound else ""
    lines = [f"{report.samples} samples, {len(report.bad)} of them bad; decoded without error: {media}{sound}"]
    for kind, count in report.kinds.items():
        lines.append(f"  {kind}: {count} ({QUARANTINE_REASONS[kind]})")
        examples = one_per_reason(sample for sample in report.bad if sample.kind == kind)[:MAX_EXAMPLES_PER_REASON]
        lines += [f"    {sample}" for sample in examples]
        if count > len(examples):
            lines.append(f"    and {count - len(examples)} more: --out bad.jsonl lists all")
    if not report.passed:
        lines.append(f"failed: data.max_bad_rate allows {report.allowed_rate:.2%} bad samples")
    return "\n".join(lines)
