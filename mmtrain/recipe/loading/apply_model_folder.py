"""Fill the settings of pretrained models (`model.hf`, and `hf` of units) into a recipe."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError, UnknownModelError
from mmtrain.extras import GUESTS
from mmtrain.families import CONFIG_FILE, ModelFolder, read_model_folder
from mmtrain.families.diffusers_vae import AUTOENCODER, latent_settings
from mmtrain.families.folder_files import SLOW_TOKENIZER_FILES, TOKENIZER_FILE
from mmtrain.families.hub_models import fetch_config, is_hub_name
from mmtrain.recipe.raw_tree import KeyPath, Node, Origin, Problem, node_at, set_node, to_node, to_plain
from mmtrain.recipe.settings.modalities import MODALITIES

FOLDER_SETTING = ("model", "hf")
AUTOENCODER_SETTING = ("model", "generator", "vae")
GUEST_SETTING = ("model", "guest")
# What holds for every guest, where a recipe leaves it open.
_GUEST_SETTINGS: Mapping[tuple[str, ...], Any] = {
    ("parallel", "placement"): "replicated",
    ("parallel", "llm", "tp"): 1,
    ("parallel", "llm", "cp"): 1,
    ("parallel", "llm", "recompute_activation_function"): False,
}
_TOKENIZER_SETTING = ("data", "tokenizer")
_GROWING = "vocab"  # of the LLM: a recipe may have more tokens than the folder
# The sections of `data` that a unit's folder speaks of.
_DATA_SECTIONS = {"vision": ("image", "video"), "audio": ("audio",), "llm": (), "generator": ()}
# A folder with one of these is a tokenizer too; one that mmtrain cannot read is reported when it is loaded.
_TOKENIZER_FILES = (TOKENIZER_FILE, *SLOW_TOKENIZER_FILES)


def apply_model_folders(tree: Node) -> tuple[Node, list[Problem]]:
    """Add the settings that the folders of `model.hf` and of units state, and return what contradicts them.

    Shapes of units must be those of the folder, because its weights have them; only the vocabulary may be larger. What
    the folder says of a section of data are defaults, for recipes that do not choose the `scheme` of that section
    themselves. Its tokenizer and chat template are those of a recipe that names no other.
    """
    problems: list[Problem] = []
    tree = _apply_folder(tree, FOLDER_SETTING, None, problems)
    for section, unit in _unit_sections(tree):
        tree = _apply_folder(tree, (*section, "hf"), unit, problems)
    return _apply_autoencoder(tree, problems), problems


def is_folder_setting(keys: KeyPath) -> bool:
    """Return whether a setting names a pretrained model."""
    return len(keys) > 1 and keys[0] == "model" and keys[-1] == "hf"


def _unit_sections(tree: Node) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the section of every unit that may have a folder, and what the unit is called in folders."""
    for unit in (*MODALITIES, "llm", "generator"):
        yield ("model", unit), unit
    encoders = node_at(tree, ("model", "encoders"))
    for name in encoders.value if encoders is not None and isinstance(encoders.value, dict) else ():
        modality = node_at(tree, ("model", "encoders", name, "modality"))
        if modality is not None and modality.value in MODALITIES:
            yield ("model", "encoders", name), str(modality.value)


def _apply_folder(tree: Node, where: tuple[str, ...], unit: str | None, problems: list[Problem]) -> Node:
    """Add what the folder at the setting `where` states: of all its units, or of `unit` for the section of `where`."""
    setting = node_at(tree, where)
    if setting is None or not isinstance(setting.value, str):
        return tree
    try:
        folder = _read_folder(tree, folder_of(setting.value), unit)
    except ModelFolderError as error:
        problems.append(Problem(where, str(error), setting.origin))
        return tree
    if (unit or "llm") not in folder.settings.model:
        units = " and ".join(folder.settings.model)
        text = f"{folder.path} ({folder.family.name}) holds {units}, but no {unit or 'llm'}; name it for its own unit"
        problems.append(Problem(where, text, setting.origin))
        return tree
    tree = _set(tree, where, to_node(str(folder.path), setting.origin))
    if folder.is_guest:
        tree = _as_guest(tree, setting.origin)
    origin = Origin(str(folder.path / CONFIG_FILE), None, folder.path)
    units_in_folder = folder.settings.model
    if unit is not None:
        own = {key: value for key, value in units_in_folder[unit].items() if key != "projector"}
        tree = _fill_unit(tree, where[:-1], own, origin, where, problems)
    for name, settings in units_in_folder.items() if unit is None else ():
        tree = _fill_unit(tree, ("model", name), settings, origin, where, problems)
    sections = folder.settings.data if unit is None else _DATA_SECTIONS[unit]
    for section in sections:
        if section not in folder.settings.data or node_at(tree, ("data", section, "scheme")) is not None:
            continue  # the defaults belong to the folder's scheme
        try:
            settings = folder.data_settings(section)
        except ModelFolderError as error:
            problems.append(Problem(where, str(error), setting.origin))
        else:
            tree = _fill(tree, ("data", section), settings, origin, None)
    has_tokenizer = any((folder.path / name).exists() for name in _TOKENIZER_FILES)
    if unit in (None, "llm") and has_tokenizer and node_at(tree, _TOKENIZER_SETTING) is None:
        tree = _set(tree, _TOKENIZER_SETTING, to_node(str(folder.path), origin))
    return tree


def _apply_autoencoder(tree: Node, problems: list[Problem]) -> Node:
    """Add the size and the channels of latents that the folder of the autoencoder states."""
    setting = node_at(tree, AUTOENCODER_SETTING)
    if setting is None or not isinstance(setting.value, str):
        return tree
    try:
        folder = read_model_folder(Path(setting.value))
        if AUTOENCODER not in folder.settings.model:
            raise ModelFolderError(f"{folder.path} ({folder.family.name}) is no autoencoder; allowed: AutoencoderKL")
    except ModelFolderError as error:
        problems.append(Problem(AUTOENCODER_SETTING, str(error), setting.origin))
        return tree
    origin = Origin(str(folder.path / CONFIG_FILE), None, folder.path)
    latents = latent_settings(folder.settings.model[AUTOENCODER])
    drawn = node_at(tree, ("model", "generator", "channels"))
    if drawn is not None and drawn.value != latents["channels"]:
        text = (
            f"its latents have {latents['channels']} channels ({origin}), but the generator draws {drawn.value} "
            f"({drawn.origin}); name the autoencoder of the generator's pipeline, or change model.generator.channels"
        )
        problems.append(Problem(AUTOENCODER_SETTING, text, setting.origin))
        return tree
    return _fill(tree, AUTOENCODER_SETTING[:-1], latents, origin, problems)


def _fill_unit(
    tree: Node,
    section: tuple[str, ...],
    settings: Mapping[str, Any],
    origin: Origin,
    where: tuple[str, ...],
    problems: list[Problem],
) -> Node:
    """Add the settings of a unit that the folder at the setting `where` holds."""
    is_guest = _value(tree, GUEST_SETTING) is True
    rivals = {"preset": f"{'.'.join(where)} supplies the settings of this unit; remove the preset or the folder"}
    if where == FOLDER_SETTING:
        rivals["hf"] = "the folder of model.hf holds this unit too; leave one of the two out"
    for key, text in rivals.items():
        rival = node_at(tree, (*section, key))
        if rival is not None and rival.value is not None:
            problems.append(Problem((*section, key), text, rival.origin))
    growing = node_at(tree, (*section, _GROWING))
    if is_guest and growing is not None and growing.value != settings.get(_GROWING):
        text = f"is {growing.value!r} here, but {origin} has {settings.get(_GROWING)} tokens; a guest takes no new ones"
        problems.append(Problem((*section, _GROWING), text, growing.origin))
    return _fill(tree, section, settings, origin, problems)


def _read_folder(tree: Node, path: Path, unit: str | None) -> ModelFolder:
    """Read a folder, as that of a guest if the recipe says so, or if no family covers its model.

    Raises ModelFolderError; for a model of a family that is not supported, with what would let it run as a guest.
    """
    if unit is None and _value(tree, GUEST_SETTING) is True:
        return read_model_folder(path, as_guest=True)
    try:
        return read_model_folder(path)
    except ModelFolderError as error:
        if unit is not None or _value(tree, GUEST_SETTING) is False:
            raise
        return read_as_guest(path, error)


def read_as_guest(path: Path, error: ModelFolderError) -> ModelFolder:
    """Read the folder of a model that no family takes, for the reason `error`.

    Raises ModelFolderError: it can be no guest, a family has it and lacks a feature, or `transformers` is missing.
    """
    try:
        folder = read_model_folder(path, as_guest=True)
    except ModelFolderError as reason:
        as_guest = f". Nor can it be a guest: {reason}" if isinstance(error, UnknownModelError) else ""
        raise type(error)(f"{error}{as_guest}") from None
    missing = GUESTS.missing()
    remedy = f", after {GUESTS.install}" if missing else ""
    if not isinstance(error, UnknownModelError):
        raise ModelFolderError(
            f"{error}. `model.guest: true` trains it with the modules of transformers, under one placement{remedy}"
        ) from None
    if missing:
        raise UnknownModelError(f"{error}. It may train as a guest (docs/guests.md){remedy}") from None
    return folder


def _as_guest(tree: Node, origin: Origin) -> Node:
    """Say that the model is a guest, and place it as guests are where the recipe leaves that open."""
    tree = _set(tree, GUEST_SETTING, to_node(True, origin))
    for where, value in _GUEST_SETTINGS.items():
        if _value(tree, where) in (None, "auto"):
            tree = _set(tree, where, to_node(value, origin))
    return tree


def _value(tree: Node, where: Iterable[str]) -> Any:
    """Return the value of a setting; None for one that the recipe leaves out."""
    node = node_at(tree, where)
    return None if node is None else node.value


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
        elif problems is not None and key == _GROWING and isinstance(written.value, int):
            if written.value < value:
                text = f"is {written.value} here, but {origin} has {value} tokens; allowed: {value} or more"
                problems.append(Problem(where, text, written.origin))
        elif problems is not None and to_plain(written) != to_plain(to_node(value, origin)):
            text = f"is {to_plain(written)!r} here, but {value!r} in {origin}, whose weights need that; remove it"
            problems.append(Problem(where, text, written.origin))
    return tree


def _set(tree: Node, where: KeyPath, node: Node) -> Node:
    """Set a value; a recipe with another thing above it stays as it is, and validation rejects it."""
    updated = set_node(tree, where, node)
    return tree if isinstance(updated, Problem) else updated
