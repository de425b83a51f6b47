"""Write a safetensors file as a stream, so that it is hashed on the way and never held in memory twice.

The library's writer takes all tensors at once and reports a full disk as an error of its own. The format is small (8
bytes with the header's length, a JSON header, the data), and the library reads what this module writes.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    """Yield the file's bytes. Tensors are copied to the host one at a time."""
    ordered = in_file_order(shards)
    yield header_of(ordered)
    for shard in ordered:
        yield tensor_bytes(shard.tensor)


def in_file_order(shards: Iterable[Shard]) -> list[Shard]:
    """Return shards as they lie in a file: widest elements first, for alignment."""
    return sorted(shards, key=lambda shard: (-shard.tensor.element_size(), key(shard.name, shard.spec)))


def header_of(ordered: Sequence[Shard]) -> bytes:
    """Return everything before the data of a file with these shards, in this order."""
    return header_bytes(
        TensorEntry(key(shard.name, shard.spec), dtype_name(shard.tensor), tuple(shard.tensor.shape))
        for shard in ordered
    )


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header of a file lists it. `dtype` is torch's name, such as `bfloat16`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the size of its data."""
        num_bits = _CODES[self.dtype].lstrip("BFIOLU") or "8"  # the code of bool has no number
        return math.prod(self.shape) * int(num_bits) // 8


def header_bytes(entries: Iterable[TensorEntry], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return everything before the data of a file with these tensors, in this order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for entry in entries:
        start = end
        end += entry.num_bytes
        header[entry.name] = {
            "dtype": _CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: "torch.Tensor") -> memoryview:
    """Return the data of a tensor, which is copied to the host if it lies elsewhere."""
    import torch

    flat = tensor.detach().reshape(-1).cpu().contiguous()
    # A tensor of one element is contiguous with any stride, but only stride 1 can be viewed as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
