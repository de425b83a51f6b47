"""Register the commands, and turn errors into a message and an exit code in one place."""

import sys
import warnings
from typing import Annotated

import typer

from mmtrain.cli import (
    chat,
    convert_config,
    data,
    doctor,
    evaluate,
    export,
    init,
    inspect,
    launch,
    plan,
    profile,
    recipes,
    report,
    simulate,
    train,
    verify,
)
from mmtrain.errors import MmtrainError, RetiredSettingWarning
from mmtrain.extras import needing_packages
from mmtrain.machine_limits import drop_thread_binding
from mmtrain.system_errors import system_errors_named
from mmtrain.version import __version__

app = typer.Typer(
    help="Plan and train multimodal LLMs.",
    no_args_is_help=True,
    rich_markup_mode=None,  # loading rich for the help page would take longer than everything else on it
    pretty_exceptions_enable=False,  # a traceback means a bug of ours; print it as Python does
)
app.command()(init.init)
app.command("convert-config")(convert_config.convert_config)
app.command()(plan.plan)
app.command()(needing_packages("train")(train.train))
app.command()(needing_packages("profile")(profile.profile))
app.command()(simulate.simulate)
app.command()(needing_packages("verify")(verify.verify))
app.command()(report.report)
app.command()(needing_packages("evaluate")(evaluate.evaluate))
app.command()(needing_packages("chat")(chat.chat))
app.command()(needing_packages("export")(export.export))
app.command()(inspect.inspect)
app.add_typer(data.app, name="data")
app.add_typer(recipes.app, name="recipes")
app.add_typer(launch.app, name="launch")
app.command()(doctor.doctor)


_format_as_python_does = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Write a warning for users like an error, without a line of our code; others as Python does."""
    if issubclass(category, RetiredSettingWarning):
        return f"mmtrain: {message}\n"
    return _format_as_python_does(message, category, filename, lineno, line)


def main() -> None:
    """Run the command in `sys.argv`, and turn an error into a message and an exit code."""
    warnings.formatwarning = _format_warning
    remark = drop_thread_binding()
    if remark is not None:
        typer.echo(f"mmtrain: {remark}", err=True)
    try:
        with system_errors_named():
            app(prog_name="mmtrain")
    except MmtrainError as error:
        typer.echo(f"mmtrain: {error}", err=True)
        sys.exit(error.exit_code)


def _version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"mmtrain {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from mmtrain.recipe import editor_schema

    typer.echo(json.dumps(editor_schema(), indent=2))
