"""Write the folder of a tiny random model of a family: to try a recipe on one core, and to test with."""

import json
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.data.synthetic.tiny_tokenizer import write_tiny_tokenizer
from mmtrain.data.synthetic.toy_conversations import write_toy_chats, write_toy_clips, write_toy_mixture
from mmtrain.errors import DataError
from mmtrain.families import FAMILIES, Family, FolderSettings, read_model_folder
from mmtrain.families.folder_files import SINGLE_FILE
from mmtrain.families.registry import plugin_families
from mmtrain.models.shapes.layer_shape import AVERAGE_SCALE, OUTPUT_SCALE

CONVERSATIONS_FOLDER = "conversations"  # below the model, so that export does not carry it along
NUM_TRAIN, NUM_HELDOUT = 2000, 100  # conversations


@dataclass(frozen=True)
class TinyModel:
    """What was written."""

    family: str
    parameters: int
    vocab: int  # tokens of the tokenizer
    train: int  # conversations
    heldout: int


def write_tiny_model(family: Family, out: Path, seed: int, num_train: int = NUM_TRAIN) -> TinyModel:
    """Write config, random weights, a tokenizer with a chat template, and conversations that suit the model.

    The same arguments give the same bytes. Raises `DataError` for a folder that holds anything but a tiny model.
    """
    conversations = out / CONVERSATIONS_FOLDER
    if out.exists() and any(out.iterdir()) and not conversations.exists():
        raise DataError(f"{out}: not empty and not a tiny model; name another folder or empty it")
    shutil.rmtree(out, ignore_errors=True)
    conversations.mkdir(parents=True)
    for name, content in family.tiny.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    settings = read_model_folder(out).settings
    num_parameters = _write_random_weights(family, settings, out, seed)
    if {"vision", "audio"} <= settings.model.keys():
        write_toy_mixture(conversations, seed, num_train, NUM_HELDOUT)
    elif "vision" in settings.model:
        generate_demo(conversations, seed, num_train, NUM_HELDOUT)
        (conversations / "tokenizer.json").unlink()  # of the demo's own model
    elif "audio" in settings.model:
        write_toy_clips(conversations, seed, num_train, NUM_HELDOUT)
    else:
        write_toy_chats(conversations, seed, num_train, NUM_HELDOUT)
    rows = json.loads((conversations / "train.json").read_text(encoding="utf-8"))
    vocab = write_tiny_tokenizer(out, _texts(rows), family)
    return TinyModel(family.name, num_parameters, vocab, num_train, NUM_HELDOUT)


def _texts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the text of every turn, in either format."""
    for row in rows:
        for turn in row.get("messages") or row["conversations"]:
            yield turn["content"] if "content" in turn else turn["value"]


def _is_zero_centered(parameter: str, settings: FolderSettings) -> bool:
    """Return whether the norms of the part of the model that has this parameter multiply by 1 + weight."""
    if parameter.startswith("llm."):
        return bool(settings.model["llm"]["zero_centered_norms"])
    vision = settings.model.get("vision")
    if vision is None or vision["projector"].get("norm_kind") != "zero_centered_rms":
        return False
    return parameter == f"vision.layers.{vision['layers'] + 1}.norm.weight"


def find_family_by_name(name: str) -> Family:
    """Return the family. Raises `DataError` with the names that there are."""
    if name in FAMILIES:
        return FAMILIES[name]
    others = {family.name: family for family in plugin_families()}
    if name not in others:
        raise DataError(f"FAMILY: found {name!r}; allowed: {', '.join((*FAMILIES, *others))}")
    return others[name]


def _write_random_weights(family: Family, settings: FolderSettings, out: Path, seed: int) -> int:
    """Write every tensor that the family names; return the number of parameters.

    Matrices are normal with standard deviation 1 / sqrt(width), so that signals keep their size; norms and layer
    scales multiply by 1, other vectors are 0.
    """
    import torch
    from safetensors.torch import save

    shapes: dict[str, tuple[int, ...]] = {}
    ours: dict[str, str] = {}
    zero_centered: set[str] = set()
    for source in (*family.weights(settings), *settings.carried):
        shapes |= source.tensor_shapes()
        ours |= dict.fromkeys(source.tensor_shapes(), source.name)
        if _is_zero_centered(source.name, settings):
            zero_centered |= source.tensor_shapes().keys()
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            tensors[name] = torch.empty(shape).normal_(std=shape[-1] ** -0.5, generator=generator)
        else:
            is_scale = ours[name].endswith(("weight", OUTPUT_SCALE, AVERAGE_SCALE)) and name not in zero_centered
            tensors[name] = torch.ones(shape) if is_scale else torch.zeros(shape)
    # `save_file` would make a file that its owner alone can read.
    (out / SINGLE_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
    return sum(tensor.numel() for tensor in tensors.values())
