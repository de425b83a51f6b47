"""Generate the reference: settings, commands, errors and the functions of `import mmtrain`, from the code itself."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click
from typer.main import get_command

import mmtrain
from mmtrain import errors
from mmtrain.cli.app import app
from mmtrain.recipe import editor_schema

HELP_COLUMNS = 100
Schema = Mapping[str, Any]


def settings_page() -> str:
    """Return a page with a table for every section of a recipe."""
    schema = editor_schema()
    parts = ["# Settings", "Every setting of a recipe, with its default. `mmtrain schema` prints the same for editors."]
    described: dict[str, str] = {}
    parts += ["## At the top", *_sections(schema, schema["$defs"], "", described)]
    return "\n\n".join(parts) + "\n"


def _sections(model: Schema, definitions: Schema, path: str, described: dict[str, str]) -> Iterator[str]:
    rows, inner = [], []
    required = model.get("required", ())
    for name, field in model["properties"].items():
        dotted = f"{path}.{name}" if path else name
        of_section = _section_of(field, definitions)
        if of_section is None:
            default = "required" if name in required else f"`{_yaml(field['default'])}`" if "default" in field else ""
            rows.append((f"`{name}`", _type(field, definitions), default, _cell(field.get("description", ""))))
            continue
        kind, title = of_section
        suffix = {"section": "", "list": ".N", "names": ".NAME"}[kind]
        if title in described:
            same = f"A section like [`{described[title]}`](#{_anchor(described[title])})."
            rows.append((f"`{name}`", "section", "", f"{_cell(field.get('description', ''))} {same}".strip()))
        else:
            about = [field.get("description", ""), definitions[title].get("description", "")]
            inner.append((dotted + suffix, title, " ".join(" ".join(dict.fromkeys(about)).split())))
            described[title] = dotted + suffix
    if rows:
        yield _markdown_table(("setting", "values", "default", "meaning"), rows)
    for dotted, title, about_section in inner:
        yield f"## `{dotted}`"
        yield about_section
        yield from _sections(definitions[title], definitions, dotted, described)


def _section_of(field: Schema, definitions: Schema) -> tuple[str, str] | None:
    """Return how a field holds settings of its own, and whose; None for a plain value."""
    for option in _options(field):
        if (title := _referred(option)) and "properties" in definitions[title]:
            return "section", title
        items, named = option.get("items", {}), option.get("additionalProperties", {})
        if title := _referred(items):
            return "list", title
        if isinstance(named, Mapping) and (title := _referred(named)):
            return "names", title
    return None


def _options(field: Schema) -> list[Schema]:
    return [part for option in field.get("anyOf", [field]) for part in (option.get("anyOf") or [option])]


def _referred(field: Schema) -> str | None:
    reference = field.get("$ref")
    return None if reference is None else reference.rpartition("/")[2]


def _type(field: Schema, definitions: Schema) -> str:
    """Describe what a plain setting may be, with its limits."""
    texts = []
    for option in _options(field):
        if "env:" in option.get("pattern", ""):
            continue  # `${env:NAME}` may stand for every value
        if "enum" in option:
            texts += [f"`{_yaml(value)}`" for value in option["enum"]]
        elif "const" in option:
            texts.append(f"`{_yaml(option['const'])}`")
        elif option.get("type") == "null":
            texts.append("`null`")
        elif "type" in option:
            limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
            bounds = ", ".join(f"{sign} {option[key]:g}" for key, sign in limits.items() if key in option)
            texts.append(f"{option['type']}{' ' * bool(bounds)}{bounds}")
    return ", ".join(dict.fromkeys(texts)) or "see the meaning"


def _yaml(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def commands_page() -> str:
    """Return a page with the help of every command, as the command line prints it."""
    parts = ["# Commands", "What `mmtrain COMMAND --help` prints. Exit codes are on the page of [errors](errors.md)."]
    for name, command in _commands(get_command(app), "mmtrain"):
        with click.Context(
            command, info_name=name, max_content_width=HELP_COLUMNS, terminal_width=HELP_COLUMNS
        ) as context:
            parts += [f"## `{name}`", f"```text\n{command.get_help(context).rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for inner_name, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {inner_name}")


def errors_page() -> str:
    """Return a page with every error that mmtrain raises on purpose, and its exit code."""
    rows = [
        (f"`{name}`", f"`{error.__bases__[0].__name__}`", str(error.exit_code), _cell(inspect.getdoc(error) or ""))
        for name, error in vars(errors).items()
        if inspect.isclass(error) and issubclass(error, errors.MmtrainError)
    ]
    head = (
        "# Errors\n\nEvery error that mmtrain raises on purpose, in `mmtrain.errors`. Its message says what is wrong, "
        "where, and what to do. The command line prints it and exits with the code. A traceback is a bug."
    )
    tree = next(part for part in (errors.__doc__ or "").split("\n\n") if part.startswith("    "))
    return f"{head}\n\n{tree}\n\n{_markdown_table(('error', 'is a', 'exit code', 'meaning'), rows)}\n"


def python_page() -> str:
    """Return a page with the functions and classes of `import mmtrain`, from their docstrings."""
    parts = [
        "# Python",
        "The functions and classes of `import mmtrain as mm`; [From Python](../python.md) introduces them.",
    ]
    for name in mmtrain.__all__:
        value = getattr(mmtrain, name)
        if inspect.isfunction(value):
            parts += [f"## `mm.{name}`", f"```python\n{_signature(name, value)}\n```", docstring_markdown(value)]
        elif inspect.isclass(value) and name != "Recipe":
            parts += [f"## `mm.{name}`", docstring_markdown(value)]
            for member, function in vars(value).items():
                function = getattr(function, "fget", None) or getattr(function, "__func__", None) or function
                if not member.startswith("_") and inspect.isfunction(function):
                    parts += [f"### `{name}.{member}`", docstring_markdown(function)]
    parts += ["## `mm.Recipe`", "A checked recipe: [settings](settings.md) lists what it holds."]
    return "\n\n".join(parts) + "\n"


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the arguments of a function with their defaults, one in a line."""
    arguments = []
    has_keywords = False
    for argument in inspect.signature(function).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not has_keywords:
            has_keywords = True
            arguments.append("*")
        default = "" if argument.default is argument.empty else f"={argument.default!r}"
        arguments.append(f"{argument.name}{default}")
    return f"mm.{name}({', '.join(arguments)})"


def docstring_markdown(value: object) -> str:
    """Return a docstring as Markdown: paragraphs, and the entries of `Args:` and `Raises:` as lists."""
    blocks = []
    for block in (inspect.getdoc(value) or "").split("\n\n"):
        title, _, body = block.partition("\n")
        if title not in ("Args:", "Raises:"):
            blocks.append(" ".join(block.split()))
            continue
        entries = re.split(r"\n(?=    \S)", f"\n{body}")[1:]
        items = []
        for entry in entries:
            name, _, text = " ".join(entry.split()).partition(": ")
            items.append(f"* `{name}`: {text}")
        blocks += [f"**{title.removesuffix(':').replace('Args', 'Arguments')}**", "\n".join(items)]
    return "\n\n".join(blocks)


def _markdown_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _anchor(dotted: str) -> str:
    """Return the anchor of a heading, as GitHub and the site make it."""
    return re.sub(r"[^\w-]", "", dotted.lower())


REFERENCE_PAGES = {"settings": settings_page, "commands": commands_page, "errors": errors_page, "python": python_page}
