"""Fill the settings of published models into a recipe."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from mmtrain.recipe.raw_tree import Node, node_at, set_node, to_node
from mmtrain.recipe.settings.modalities import MODALITIES
from mmtrain.recipe.settings.presets import GENERATOR_PRESETS, LLM_PRESETS, ModelPreset


def presets_by_unit() -> dict[str, Mapping[str, ModelPreset]]:
    """Return the presets of every unit that a model may have, by name."""
    encoders = {modality.name: modality.presets for modality in MODALITIES.values()}
    return {**encoders, "llm": dict(LLM_PRESETS.items()), "generator": dict(GENERATOR_PRESETS.items())}


def apply_presets(tree: Node) -> Node:
    """Add to every unit the settings of the preset that it names; the recipe's own settings take precedence.

    Unknown names are left as they are: validation reports them.
    """
    for path, presets in _sections_with_presets(tree):
        section = node_at(tree, path)
        name = node_at(section, ("preset",))
        if section is None or name is None or name.value not in presets:
            continue
        origin = replace(name.origin, source=f"{name.origin}, preset {name.value}", line=None)
        preset = {key: to_node(value, origin) for key, value in presets[str(name.value)].settings.items()}
        settings = section.value if isinstance(section.value, dict) else {}
        filled = set_node(tree, path, replace(section, value={**preset, **settings}))
        assert isinstance(filled, Node)
        tree = filled
    return tree


def _sections_with_presets(tree: Node) -> Iterator[tuple[tuple[str, ...], Mapping[str, ModelPreset]]]:
    """Yield path and presets of every section that may name a preset."""
    for unit, presets in presets_by_unit().items():
        yield ("model", unit), presets
    encoders = node_at(tree, ("model", "encoders"))
    for name in encoders.value if encoders is not None and isinstance(encoders.value, dict) else ():
        modality = node_at(tree, ("model", "encoders", name, "modality"))
        if modality is not None and modality.value in MODALITIES:
            yield ("model", "encoders", name), MODALITIES[str(modality.value)].presets
