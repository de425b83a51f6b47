"""Fill the settings of a pretrained model (`model.hf`) into a recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families import CONFIG_FILE, read_model_folder
from mmtrain.families.folder_files import SLOW_TOKENIZER_FILES, TOKENIZER_FILE
from mmtrain.families.hub_models import fetch_config, is_hub_name
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, node_at, set_node, to_node, to_plain

FOLDER_SETTING = ("model", "hf")
_TOKENIZER_SETTING = ("data", "tokenizer")
# A folder with one of these is a tokenizer too; one that mmtrain cannot read is reported when it is loaded.
_TOKENIZER_FILES = (TOKENIZER_FILE, *SLOW_TOKENIZER_FILES)


def apply_model_folder(tree: Node) -> tuple[Node, list[Problem]]:
    """Add the settings that the folder of `model.hf` states, and return what contradicts them.

    Shapes of units must be those of the folder, because its weights have them. What the folder says of a section of
    data are defaults, for recipes that do not choose the `scheme` of that section themselves. Its tokenizer and chat
    template are those of a recipe that names no other.
    """
    setting = node_at(tree, FOLDER_SETTING)
    if setting is None or not isinstance(setting.value, str):
        return tree, []
    try:
        folder = read_model_folder(folder_of(setting.value))
    except ModelFolderError as error:
        return tree, [Problem(FOLDER_SETTING, str(error), setting.origin)]
    tree = _set(tree, FOLDER_SETTING, to_node(str(folder.path), setting.origin))
    origin = Origin(str(folder.path / CONFIG_FILE), None, folder.path)
    problems: list[Problem] = []
    for unit, settings in folder.settings.model.items():
        preset = node_at(tree, ("model", unit, "preset"))
        if preset is not None and preset.value is not None:
            text = "model.hf supplies the settings of this unit; remove the preset or model.hf"
            problems.append(Problem(("model", unit, "preset"), text, preset.origin))
        tree = _fill(tree, ("model", unit), settings, origin, problems)
    for section in folder.settings.data:
        if node_at(tree, ("data", section, "scheme")) is not None:
            continue  # the defaults belong to the folder's scheme
        try:
            settings = folder.data_settings(section)
        except ModelFolderError as error:
            problems.append(Problem(FOLDER_SETTING, str(error), setting.origin))
        else:
            tree = _fill(tree, ("data", section), settings, origin, None)
    has_tokenizer = any((folder.path / name).exists() for name in _TOKENIZER_FILES)
    if has_tokenizer and node_at(tree, _TOKENIZER_SETTING) is None:
        tree = _set(tree, _TOKENIZER_SETTING, to_node(str(folder.path), origin))
    return tree, problems


def folder_of(value: str) -> Path:
    """Return the folder that a setting names: a path, or a model of the hub, whose config is fetched.

    Raises ModelFolderError.
    """
    return fetch_config(value) if is_hub_name(value) else Path(value)


def _fill(
    tree: Node, path: tuple[str, ...], settings: Mapping[str, Any], origin: Origin, problems: list[Problem] | None
) -> Node:
    """Add settings that are missing below `path`; add to `problems`, if given, those that have another value."""
    for key, value in settings.items():
        where = (*path, key)
        written = node_at(tree, where)
        if isinstance(value, Mapping) and (written is None or isinstance(written.value, dict)):
            tree = _fill(tree, where, value, origin, problems)
        elif written is None:
            tree = _set(tree, where, to_node(value, origin))
        elif problems is not None and to_plain(written) != to_plain(to_node(value, origin)):
            text = f"is {to_plain(written)!r} here, but {value!r} in {origin}, whose weights need that; remove it"
            problems.append(Problem(where, text, written.origin))
    return tree


def _set(tree: Node, where: KeyPath, node: Node) -> Node:
    """Set a value; a recipe with another thing above it stays as it is, and validation rejects it."""
    updated = set_node(tree, where, node)
    return tree if isinstance(updated, Problem) else updated
