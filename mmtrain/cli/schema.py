"""`mmtrain schema`."""

import typer


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    import json

    from mmtrain.recipe import editor_schema

    typer.echo(json.dumps(editor_schema(), indent=2))
