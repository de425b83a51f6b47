"""Write a safetensors file as a stream, so that it is hashed on the way and never held in memory twice.

The library's writer takes all tensors at once and reports a full disk as an error of its own. The format is small (8
bytes with the header's length, a JSON header, the data), and the library reads what this module writes.
"""

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mmtrain.checkpoint.tensor_pieces import Shard, ShardSpec
from mmtrain.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def key(name: str, spec: ShardSpec) -> str:
    """Return the name of a piece inside its file."""
    return f"{name}|{spec.to_text()}"


def dtype_name(tensor: "torch.Tensor") -> str:
    """Return torch's name of a dtype without its prefix. Raises CheckpointError for a dtype that cannot be stored."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _CODES:
        raise CheckpointError(f"cannot store dtype {name}; allowed: {', '.join(_CODES)}")
    return name


def chunks(shards: Sequence[Shard]) -> Iterator[bytes | memoryview]:
    """Yield the file's bytes. Tensors are copied to the host one at a time, widest elements first for alignment."""
    import torch

    ordered = sorted(shards, key=lambda shard: (-shard.tensor.element_size(), key(shard.name, shard.spec)))
    header = {}
    end = 0
    for shard in ordered:
        start = end
        end += shard.tensor.numel() * shard.tensor.element_size()
        header[key(shard.name, shard.spec)] = {
            "dtype": _CODES[dtype_name(shard.tensor)],
            "shape": list(shard.tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for shard in ordered:
        flat = shard.tensor.detach().reshape(-1).cpu().contiguous()
        # A tensor of one element is contiguous with any stride, but only stride 1 can be viewed as bytes.
        yield flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
