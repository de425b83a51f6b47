"""Find the chat templates of a Hugging Face folder, and which conversations each is for, as transformers does."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.errors import DataError
from mmtrain.families.folder_files import (
    PROCESSOR_FILE,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TEMPLATE_JSON_FILE,
    TOKENIZER_CONFIG_FILE,
)
from mmtrain.foreign_json import parse_json

_DEFAULT, _TOOL_USE = "default", "tool_use"  # names to which transformers gives a meaning, where a folder has several


@dataclass(frozen=True)
class NamedTemplate:
    """A chat template."""

    source: str
    name: str  # what messages call it


@dataclass(frozen=True)
class FolderTemplates:
    """The chat templates of a folder that are in use."""

    default: NamedTemplate
    tool_use: NamedTemplate | None = None  # of conversations with tools, if that is another one


def find_templates(path: Path, has_processor: bool) -> FolderTemplates:
    """Return the folder's chat templates. Raises `DataError` if there is none, or none of several is the default.

    has_processor: whether the model is served through a processor. That looks into files of its own first, and uses
        its default for conversations with tools too.
    """
    templates = _of_processor(path) or _of_tokenizer(path) if has_processor else _of_tokenizer(path)
    if not templates and not has_processor:
        templates = _of_processor(path)  # older models have the template there only
    if not templates:
        raise DataError(
            f"data.tokenizer: {path} has no chat template; put the one that your model was trained with into "
            f"{TEMPLATE_FILE} there (instruction-tuned versions of a model have one, base versions mostly do not)"
        )
    if _DEFAULT not in templates:
        where = next(iter(templates.values())).name.rpartition(", template")[0]
        raise DataError(
            f"data.tokenizer: {where} has templates named {', '.join(sorted(templates))}, but none named "
            f"`{_DEFAULT}`; put the one to train with into {TEMPLATE_FILE}"
        )
    return FolderTemplates(templates[_DEFAULT], None if has_processor else templates.get(_TOOL_USE))


def template_files(path: Path) -> list[Path]:
    """Return the files of further chat templates in a folder, in the order of their names."""
    return sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))


def template_of_processor(path: Path) -> Any:
    """Return the template, or the templates by name, that the file of a processor states; None if it states none."""
    return read_json(path / PROCESSOR_FILE).get("chat_template")


def _of_tokenizer(path: Path) -> dict[str, NamedTemplate]:
    """Return by name the templates that a tokenizer takes."""
    in_files = _main_file(path) | _further_files(path)
    stated = read_json(path / TOKENIZER_CONFIG_FILE).get("chat_template")
    return in_files or _stated_templates(stated, f"{path / TOKENIZER_CONFIG_FILE} (chat_template)")


def _of_processor(path: Path) -> dict[str, NamedTemplate]:
    """Return by name the templates that a processor takes, but for those of its tokenizer."""
    stated = _stated_templates(template_of_processor(path), f"{path / PROCESSOR_FILE} (chat_template)")
    if stated:
        return stated
    file, further = path / TEMPLATE_JSON_FILE, _further_files(path)
    older = _stated_templates(read_json(file).get("chat_template"), f"{file} (chat_template)")
    if older and further:
        raise DataError(
            f"data.tokenizer: {path} has {TEMPLATE_JSON_FILE} and files in {TEMPLATE_FOLDER}/, which transformers "
            f"rejects together; put the template of {TEMPLATE_JSON_FILE} into {TEMPLATE_FILE}"
        )
    return older or further | _main_file(path)


def _main_file(path: Path) -> dict[str, NamedTemplate]:
    file = path / TEMPLATE_FILE
    return {_DEFAULT: NamedTemplate(_read_text(file), str(file))} if file.exists() else {}


def _further_files(path: Path) -> dict[str, NamedTemplate]:
    folder = path / TEMPLATE_FOLDER
    return {
        file.stem: NamedTemplate(_read_text(file), f"{folder}, template `{file.stem}`") for file in template_files(path)
    }


def _stated_templates(stated: Any, name: str) -> dict[str, NamedTemplate]:
    """Return by name the templates that a JSON file states: as one text, as a list of them, or by name."""
    if isinstance(stated, str):
        return {_DEFAULT: NamedTemplate(stated, name)}
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
    if not isinstance(stated, dict):
        return {}
    return {
        key: NamedTemplate(source, f"{name}, template `{key}`")
        for key, source in stated.items()
        if isinstance(key, str) and isinstance(source, str)
    }


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file of a folder; an empty one if there is no such file. Raises `DataError`."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"data.tokenizer: {file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise DataError(f"data.tokenizer: {file}: expected a JSON object, found {type(content).__name__}")
    return content
