"""The manifest: everything a reader needs to know before it opens a tensor file, protected by its own sum."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmtrain.checkpoint import folders as layout
from mmtrain.checkpoint.storage import FileSum
from mmtrain.checkpoint.tensor_pieces import ShardSpec
from mmtrain.errors import CheckpointError
from mmtrain.version import __version__
from mmtrain.written_by import WRITTEN_BY, describe_other_format

FORMAT = 1
SUSPECT_SINCE = "suspect_since"  # key of the state: the step from which on the weights may be spoiled, or None
BEST_STEP = "best_step"  # key of the state: the step of the best checkpoint so far, or None
_FRAME = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)


@dataclass(frozen=True)
class Piece:
    """A stored piece: the rank whose file holds it, and the part of the tensor."""

    rank: int
    spec: ShardSpec


@dataclass(frozen=True)
class StoredTensor:
    """A tensor with all its pieces. `dtype` is torch's name, such as `bfloat16`."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """Contents of `manifest.json`; `to_bytes` and `from_bytes` are inverse."""

    step: int
    world_size: int
    state: Mapping[str, Any]
    files: Mapping[str, FileSum]
    tensors: Mapping[str, StoredTensor]

    def to_bytes(self) -> bytes:
        """Write JSON that starts with the SHA-256 of its own body, so that any changed byte is detected."""
        body = json.dumps(
            {
                "format": FORMAT,
                WRITTEN_BY: __version__,
                "step": self.step,
                "world_size": self.world_size,
                "state": self.state,
                "files": {name: [file.num_bytes, file.sha256] for name, file in self.files.items()},
                "tensors": {
                    name: {
                        "dtype": tensor.dtype,
                        "shape": tensor.shape,
                        "pieces": [[piece.rank, piece.spec.to_text()] for piece in tensor.pieces],
                    }
                    for name, tensor in self.tensors.items()
                },
            },
            allow_nan=False,
        ).encode()
        return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)

    @classmethod
    def from_bytes(cls, content: bytes) -> "Manifest":
        """Parse and verify. Raises CheckpointError that says what is wrong."""
        match = _FRAME.fullmatch(content)
        if match is None:
            raise CheckpointError("not a manifest, or cut short")
        if hashlib.sha256(match[2]).hexdigest().encode() != match[1]:
            raise CheckpointError("damaged: its SHA-256 is not the one at its start")
        try:
            return cls._from_body(json.loads(match[2]))
        except KeyError as error:
            raise CheckpointError(f"lacks {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"is not what mmtrain writes: {error}") from error

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> "Manifest":
        """Parse what the sum covers. A sum says that nothing changed, and not that mmtrain wrote it."""
        if body["format"] != FORMAT:
            raise CheckpointError(describe_other_format(body["format"], body.get(WRITTEN_BY), FORMAT))
        step, world_size, state = body["step"], body["world_size"], body["state"]
        if type(step) is not int or type(world_size) is not int or world_size < 1 or not isinstance(state, dict):
            raise TypeError(f"step {step!r}, world_size {world_size!r}, state {state!r}")
        files = {name: FileSum(*file) for name, file in body["files"].items()}
        tensors = {name: _tensor(**tensor) for name, tensor in body["tensors"].items()}
        if len(files) != 2 * world_size or not all(
            {layout.tensor_file(rank), layout.state_file(rank)} <= files.keys() for rank in range(world_size)
        ):
            raise ValueError(f"it does not name the two files of each of {world_size} ranks")
        ranks = {piece.rank for tensor in tensors.values() for piece in tensor.pieces}
        if not ranks <= set(range(world_size)):
            raise ValueError(f"it names pieces of ranks {sorted(ranks)}, of {world_size}")
        return cls(step, world_size, state, files, tensors)


def join_pieces(pieces_of_rank: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, StoredTensor]:
    """Join the pieces that each rank wrote, {name: {dtype, shape, pieces: [spec, ...]}}, into one table.

    Raises CheckpointError if ranks disagree about a tensor or its pieces do not add up: an incomplete save must fail
    while the weights still exist.
    """
    tensors: dict[str, StoredTensor] = {}
    for rank, pieces in enumerate(pieces_of_rank):
        for name, piece in pieces.items():
            part = _tensor(piece["dtype"], piece["shape"], [[rank, spec_text] for spec_text in piece["pieces"]])
            tensor = tensors.setdefault(name, StoredTensor(part.dtype, part.shape, ()))
            if (tensor.dtype, tensor.shape) != (part.dtype, part.shape):
                raise CheckpointError(
                    f"{name}: rank {rank} has {part.dtype} {list(part.shape)}, "
                    f"a lower rank {tensor.dtype} {list(tensor.shape)}"
                )
            tensors[name] = StoredTensor(tensor.dtype, tensor.shape, tensor.pieces + part.pieces)
    for name, tensor in tensors.items():
        stored = sum(piece.spec.size for piece in tensor.pieces)
        expected = math.prod(tensor.shape)
        if stored != expected:
            raise CheckpointError(
                f"{name}: the ranks' pieces hold {stored} elements, the tensor has {expected}; "
                "each element must be saved by exactly one rank"
            )
    return tensors


def _tensor(dtype: str, shape: Sequence[int], pieces: Sequence[Sequence[Any]]) -> StoredTensor:
    full_shape = tuple(shape)
    stored = tuple(Piece(rank, ShardSpec.from_text(spec_text, full_shape)) for rank, spec_text in pieces)
    return StoredTensor(dtype, full_shape, stored)
