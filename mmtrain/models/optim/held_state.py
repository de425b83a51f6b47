"""What a rank holds of weights and optimizer state between two updates, and exact sums over its bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

_WORD_BYTES = 8
# Below this size tensors are copied together and summed at once. On a CPU a call takes 1 microsecond, as much as
# reading so many words; on a GPU launching takes more (not measured), and copies must stay small beside the model.
MAX_JOINED_WORDS = {"cpu": 2**10, "cuda": 2**13}


@dataclass(frozen=True)
class HeldTensor:
    """A tensor that holds its bits from one update to the next one.

    Attributes:
        name: that of checkpoints. `#rounded` marks the weights that passes compute with where master weights are kept
            beside them, and `#gathered` those that were gathered from the shards of all replicas.
        tensor: the live tensor.
        changes: what writes it: nothing, an update of this rank, or a gather after an update.
        replicas: the groups whose ranks hold the same bits.
    """

    name: str
    tensor: Tensor
    changes: Literal["never", "by update", "by gather"]
    replicas: tuple[dist.ProcessGroup, ...] = ()


class BitSums:
    """Sums the bits of tensors as whole numbers, one sum for each tensor, modulo 2^64.

    A tensor is read as words of 64 bits, so a flipped bit changes its sum by a power of two, and the sum does not
    depend on the order. The device is not waited for.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Prepare to sum `tensors`, which stay where they are in the memory of `device`."""
        self._num_tensors, self._device = len(tensors), device
        self._pieces: list[Tensor] = []  # summed by themselves
        joined: dict[torch.dtype, list[tuple[int, Tensor]]] = {torch.int64: [], torch.uint8: []}
        of_pieces: list[int] = []
        self._copied: list[tuple[Tensor, Tensor]] = []  # what no word starts with; none of today's optimizers has any
        for number, tensor in enumerate(tensors):
            source = tensor.detach()
            if source.storage_offset() * source.element_size() % _WORD_BYTES:
                self._copied.append((torch.empty_like(source), source))
                source = self._copied[-1][0]
            for part in _parts(source):
                if part.dtype == torch.int64 and len(part) >= MAX_JOINED_WORDS.get(device.type, 0):
                    self._pieces.append(part)
                    of_pieces.append(number)
                else:
                    joined[part.dtype].append((number, part))
        self._joined = [_Joined(parts, device) for parts in joined.values() if parts]
        numbers = [*of_pieces, *(number for parts in joined.values() for number, _ in parts)]
        self._numbers = torch.tensor(numbers, dtype=torch.int64, device=device)

    def compute(self) -> Tensor:
        """Return the sums, (tensors,) in int64."""
        sums = torch.zeros(self._num_tensors, dtype=torch.int64, device=self._device)
        if not len(self._numbers):
            return sums
        for copy, source in self._copied:
            copy.copy_(source)
        of_pieces = [torch.stack([piece.sum() for piece in self._pieces])] if self._pieces else []
        return sums.index_add_(0, self._numbers, torch.cat([*of_pieces, *(joined.sums() for joined in self._joined)]))


class _Joined:
    """Small parts, which one copy, one running sum and one difference sum up together."""

    def __init__(self, parts: Sequence[tuple[int, Tensor]], device: torch.device) -> None:
        self._parts = [part for _, part in parts]
        self._lasts = torch.tensor([len(part) for part in self._parts], device=device).cumsum(0) - 1

    def sums(self) -> Tensor:
        """Return the sum of each part."""
        running = torch.cat(self._parts).long().cumsum(0)[self._lasts]
        return torch.diff(running, prepend=running.new_zeros(1))


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return views of a tensor that starts with a word: its whole words, and the bytes that are left."""
    content = tensor.view(-1).view(torch.uint8)
    end = len(content) - len(content) % _WORD_BYTES
    parts = [content[:end].view(torch.int64), content[end:]]
    return [part for part in parts if len(part)]
