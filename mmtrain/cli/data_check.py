"""`mmtrain data check`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from mmtrain.data.index.data_check import CheckReport

MAX_EXAMPLES_PER_REASON = 3  # of each kind of fault
NUM_PROGRESS_LINES = 4  # how often progress is told where no bar can be drawn
_PLURALS = {"image": "images", "video": "videos", "audio": "clips"}


def check(
    overrides: Overrides,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SOURCE...", help="Data files; with --recipe by default its own.", show_default=False),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(metavar="RECIPE", help="Check as this recipe would use them: its limits apply.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read and decode everything, and name what cannot be used.

    Exits with 1 if more samples are bad than data.max_bad_rate of the recipe allows (without one: 1 in 100).
    """
    import json
    import sys
    from dataclasses import asdict

    from mmtrain.cli.recipe_index import print_note
    from mmtrain.data.index.data_check import check_sources as check_any
    from mmtrain.data.index.data_check import check_sources_for_recipe
    from mmtrain.errors import UserError
    from mmtrain.recipe import load_recipe
    from mmtrain.recipe.schema import SourceSettings

    wanted = [SourceSettings(path=source.absolute()) for source in sources or []]
    with typer.progressbar(length=1, label="decoding", file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.length = total
            bar.update(1)
            if (
                not sys.stderr.isatty()
                and done * NUM_PROGRESS_LINES // total > (done - 1) * NUM_PROGRESS_LINES // total
            ):
                print_note(f"decoded {done:,} of {total:,}")

        if recipe is not None:
            settings = load_recipe(recipe, overrides).recipe
            report = check_sources_for_recipe(
                settings, wanted or [*settings.data.sources, *settings.data.validation], show, print_note
            )
        elif wanted:
            report = check_any(wanted, show, print_note)
        else:
            raise UserError("nothing to check: name data files, or a recipe with --recipe")
    if as_json:
        typer.echo(json.dumps({**asdict(report), "kinds": report.kinds, "passed": report.passed}))
    else:
        typer.echo(check_text(report))
    if not report.passed:
        raise typer.Exit(1)


def check_text(report: "CheckReport") -> str:
    """The report as lines: counts, then each kind of fault with its first examples."""
    from mmtrain.data.formats.quarantine_reasons import QUARANTINE_REASONS

    media = ", ".join(f"{_PLURALS[kind]} {count}" for kind, count in report.media.items()) or "no media"
    sound = f" ({report.seconds_of_sound:.0f} s of sound)" if report.seconds_of_sound else ""
    lines = [f"{report.samples} samples, {len(report.bad)} of them bad; decoded without fault: {media}{sound}"]
    for kind, count in report.kinds.items():
        lines.append(f"  {kind}: {count} ({QUARANTINE_REASONS[kind]})")
        lines += [f"    {q}" for q in [q for q in report.bad if q.kind == kind][:MAX_EXAMPLES_PER_REASON]]
    if not report.passed:
        lines.append(f"more than the {report.allowed_rate:.2%} that data.max_bad_rate allows")
    return "\n".join(lines)
