"""Keep in host memory what blocks save for their backward, and bring it back before that reads it.

Copies to the host run beside the forward of the next block, copies back beside the backward of the block behind. On a
GPU they have a stream of their own, and the host's memory is pinned. Between its copies a block holds nothing on the
device.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn


class OffloadedBlocks:
    """The blocks of one stage whose activations of one microbatch are in host memory, or on their way."""

    def __init__(self) -> None:
        self._last: ReferenceType[_BlockActivations] | None = None

    def last(self) -> "_BlockActivations | None":
        """Return the last of them, whose backward comes first; None if its backward has been, or there is none."""
        return None if self._last is None else self._last()

    def append(self, activations: "_BlockActivations") -> None:
        """Add a block that has run forward."""
        self._last = ref(activations)

    def fetch_last(self) -> None:
        """Start to copy back what the next backward reads first."""
        if (activations := self.last()) is not None:
            activations.start_fetch()


class HostOffload:
    """Copies activations between a device and its host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._leaving: ReferenceType[_BlockActivations] | None = None  # the last block, which the device still holds

    @classmethod
    @cache
    def of(cls, device: torch.device) -> "HostOffload":
        """Return the only one of a device: all stages of a process share its stream."""
        return cls(device)

    @contextmanager
    def offload(self, block: nn.Module, shared: Iterable[Tensor], blocks: OffloadedBlocks) -> Iterator[None]:
        """Keep on the host what autograd saves of floating-point activations inside the context.

        Args:
            block: whose parameters stay where they are.
            shared: tensors that other blocks save too.
            blocks: of the same stage and microbatch; the block becomes their last.
        """
        activations = _BlockActivations(self._device, self._stream, blocks.last(), _Resident(block, shared))
        with torch.autograd.graph.saved_tensors_hooks(activations.pack, activations.unpack):
            yield
        activations.start_copy()
        leaving = None if self._leaving is None else self._leaving()
        if leaving is not None:
            leaving.finish_copy()
        self._leaving = ref(activations)
        blocks.append(activations)


class _Resident:
    """Memory that stays on the device: parameters, and what several blocks share."""

    def __init__(self, block: nn.Module, shared: Iterable[Tensor]) -> None:
        self._block, self._shared = block, tuple(shared)
        self._addresses: frozenset[int] | None = None

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in it."""
        if self._addresses is None:  # here, inside the forward, the parameters of a sharded block are gathered
            tensors = (*self._block.parameters(), *self._shared)
            self._addresses = frozenset(map(_storage_address, tensors))
        return _storage_address(tensor) in self._addresses


class _Saved(NamedTuple):
    """What autograd holds in place of a tensor."""

    activations: "_BlockActivations"
    key: Hashable
    shape: torch.Size


class _BlockActivations:
    """What one block saves of one microbatch: on the device, then on the host, then on the device again."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        before: "_BlockActivations | None",
        resident: _Resident,
    ) -> None:
        self._device, self._stream = device, stream
        self._before = None if before is None else ref(before)  # of the same microbatch, whose backward is next
        self._resident: _Resident | None = resident
        self._on_device: dict[Hashable, Tensor] = {}
        self._on_host: dict[Hashable, Tensor] = {}
        self._num_readers: Counter[Hashable] = Counter()  # how many of autograd's functions have yet to read a tensor
        self._copied: torch.cuda.Event | None = None
        self._fetched: torch.cuda.Event | None = None
        self._has_backward_begun = False

    def pack(self, tensor: Tensor) -> "Tensor | _Saved":
        """Take a tensor that autograd saves; return what it holds instead."""
        assert self._resident is not None, "autograd saves inside the forward"
        if not tensor.is_floating_point() or not tensor.numel() or self._resident.holds(tensor):
            return tensor
        key = _key(tensor)
        self._on_device.setdefault(key, tensor.detach())
        self._num_readers[key] += 1
        return _Saved(self, key, tensor.shape)

    @staticmethod
    def unpack(saved: "Tensor | _Saved") -> Tensor:
        """Return the tensor that autograd saved."""
        if isinstance(saved, Tensor):
            return saved
        return saved.activations.read(saved.key).view(saved.shape)

    def read(self, key: Hashable) -> Tensor:
        """Return a saved tensor on the device, and forget it there if this was its last reader."""
        if not self._has_backward_begun:
            self._start_backward()
        tensor = self._on_device.get(key)
        if tensor is None:  # a second backward over the same graph
            tensor = self._on_host[key].to(self._device)
        self._num_readers[key] -= 1
        if self._num_readers[key] <= 0:
            self._on_device.pop(key, None)
        return tensor

    def start_copy(self) -> None:
        """Start to copy to the host what the forward of the block has saved."""
        self._resident = None
        self._on_host = {key: empty_on_host(tensor) for key, tensor in self._on_device.items()}
        self._copied = self._copy(self._on_device, self._on_host)

    def finish_copy(self) -> None:
        """Free the device's memory once the copies are made, unless the backward reads it already."""
        if self._has_backward_begun:
            return
        self._wait_for(self._copied)
        self._on_device = {}

    def start_fetch(self) -> None:
        """Start to copy back to the device, unless everything is still there."""
        if self._on_device or self._has_backward_begun:
            return
        # Allocated on the stream that computes, so that a copy must not overtake what used the memory before.
        self._on_device = {key: torch.empty_like(tensor, device=self._device) for key, tensor in self._on_host.items()}
        self._fetched = self._copy(self._on_host, self._on_device)

    def _start_backward(self) -> None:
        """Wait for the activations, and start to fetch those of the block before."""
        self.start_fetch()
        self._has_backward_begun = True
        self._wait_for(self._copied)  # which reads what the backward frees, if the block is still on the device
        self._wait_for(self._fetched)
        before = None if self._before is None else self._before()
        if before is not None:
            before.start_fetch()

    def _copy(self, sources: dict[Hashable, Tensor], targets: dict[Hashable, Tensor]) -> "torch.cuda.Event | None":
        """Copy tensors, on a GPU beside what the current stream computes next; return what marks the end."""
        if self._stream is None:
            for key, target in targets.items():
                target.copy_(sources[key])
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for key, target in targets.items():
                target.copy_(sources[key], non_blocking=True)
            copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def _wait_for(self, event: "torch.cuda.Event | None") -> None:
        """Let the current stream wait for copies."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def empty_on_host(tensor: Tensor) -> Tensor:
    """Allocate host memory for a copy of a tensor; that of a GPU's is pinned, so that copies are asynchronous."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def _key(tensor: Tensor) -> Hashable:
    """Return what tells a saved tensor from the others of its block; views of the same numbers are one."""
    place = (_storage_address(tensor), tensor.storage_offset(), tensor.dtype)
    return (*place, tensor.numel()) if tensor.is_contiguous() else (*place, tensor.shape, tensor.stride())


def _storage_address(tensor: Tensor) -> int:
    """Return what tells a storage from all others that live, also on the `meta` device, where none has memory."""
    address: int = tensor.untyped_storage()._cdata
    return address
