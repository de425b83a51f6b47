"""Write the folder of a tiny random model of a family: to try a recipe on one core, and to test with."""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

from mmtrain.data.synthetic.toy_chats import CHATS_FILE, write_toy_chats
from mmtrain.errors import DataError
from mmtrain.families import CONFIG_FILE, FAMILIES, Family, read_model_folder
from mmtrain.weights.folder_tensors import SINGLE_FILE

NUM_CONVERSATIONS = 2000


@dataclass(frozen=True)
class TinyModel:
    """What was written."""

    family: str
    parameters: int
    vocab: int  # tokens of the tokenizer
    conversations: int


def write_tiny_model(family: Family, out: Path, seed: int) -> TinyModel:
    """Write config, random weights, a tokenizer with a chat template, and conversations to train on.

    The same arguments give the same bytes. Raises `DataError` for a folder that holds anything but a tiny model.
    """
    if out.exists() and any(out.iterdir()) and not (out / CHATS_FILE).exists():
        raise DataError(f"{out}: not empty and not a tiny model; name another folder or empty it")
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG_FILE).write_text(json.dumps(family.tiny, indent=1) + "\n", encoding="utf-8")
    num_parameters = _write_random_weights(family, out, seed)
    chats = write_toy_chats(out, seed, NUM_CONVERSATIONS)
    return TinyModel(family.name, num_parameters, chats.vocab, chats.conversations)


def find_family_by_name(name: str) -> Family:
    """Return the family. Raises `DataError` with the names that there are."""
    if name not in FAMILIES:
        raise DataError(f"FAMILY: found {name!r}; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _write_random_weights(family: Family, out: Path, seed: int) -> int:
    """Write every tensor that the family names; return the number of parameters.

    Matrices are normal with standard deviation 1 / sqrt(width), so that signals keep their size; norms are 1, other
    vectors 0.
    """
    import torch
    from safetensors.torch import save_file

    shapes: dict[str, tuple[int, ...]] = {}
    settings = read_model_folder(out).settings
    for source in (*family.weights(settings), *settings.carried):
        shapes |= source.tensor_shapes()
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
            tensors[name] = torch.empty(shape).normal_(std=shape[-1] ** -0.5, generator=generator)
        else:
            is_scale = "norm" in name and name.endswith("weight")
            tensors[name] = torch.ones(shape) if is_scale else torch.zeros(shape)
    save_file(tensors, out / SINGLE_FILE, metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())
