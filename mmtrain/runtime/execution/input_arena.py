"""Bring the input of a step to the device in one copy, while the step before computes.

All tensors of a step lie in one arena: pinned memory on the host, and as many bytes on the device. A stream of its own
copies it. Events say when the copy may overwrite the device's bytes, when a step may read them, and when the host's
bytes may be filled again; the host waits for the last of these only, in the thread that prepares steps.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGNMENT_BYTES = 256  # of each tensor, as CUDA's allocator aligns them: kernels read whole words
_GROWTH = 1.25  # of an arena that was too small, so that ragged steps do not allocate again and again


class ArenaCopier(Protocol):
    """Allocates arenas and copies them to the device. Marks stand for moments on the device, as in `DeviceClock`."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """Return bytes on the host and on the device."""
        ...

    def copy(self, host: Tensor, device: Tensor, released: Any) -> Any:
        """Start to copy, behind the mark `released` if there is one; return a mark at the end of the copy."""
        ...

    def wait_on_host(self, copied: Any) -> None:
        """Wait until the device has passed a mark."""
        ...

    def wait_on_device(self, copied: Any) -> None:
        """Let what is computed from now on start behind a mark; the host does not wait."""
        ...

    def mark_computed(self) -> Any:
        """Return a mark behind all that was launched so far."""
        ...


class HostCopier:
    """On a CPU a step reads what was filled: its arena is both sides."""

    def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """See `ArenaCopier`."""
        arena = torch.empty(num_bytes, dtype=torch.uint8)
        return arena, arena

    def copy(self, host: Tensor, device: Tensor, released: None) -> None:
        """See `ArenaCopier`."""

    def wait_on_host(self, copied: None) -> None:
        """See `ArenaCopier`."""

    def wait_on_device(self, copied: None) -> None:
        """See `ArenaCopier`."""

    def mark_computed(self) -> None:
        """See `ArenaCopier`."""


class CudaCopier:
    """Copies on a stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def allocate(self, num_bytes: int) -> tuple[Tensor, Tensor]:
        """See `ArenaCopier`.

        The device's bytes belong to the copying stream: those of an arena that has grown are given to another only
        behind the copies that waited for their last use.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            return host, torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, host: Tensor, device: Tensor, released: torch.cuda.Event | None) -> torch.cuda.Event:
        """See `ArenaCopier`."""
        with torch.cuda.stream(self._stream):
            if released is not None:
                self._stream.wait_event(released)
            device.copy_(host, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return copied

    def wait_on_host(self, copied: torch.cuda.Event) -> None:
        """See `ArenaCopier`."""
        copied.synchronize()

    def wait_on_device(self, copied: torch.cuda.Event) -> None:
        """See `ArenaCopier`."""
        torch.cuda.current_stream(self._device).wait_event(copied)

    def mark_computed(self) -> torch.cuda.Event:
        """See `ArenaCopier`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def copier_for(device: torch.device) -> ArenaCopier:
    """Return what brings arenas to the device."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


class InputArena:
    """The memory of one step's input at a time.

    `fill` it in the thread that prepares steps; `start_step` and `end_step` in the one that computes. It may be filled
    again after `end_step`.
    """

    def __init__(self, copier: ArenaCopier) -> None:
        self._copier = copier
        self._host, self._device = copier.allocate(0)
        self._is_copied = False  # whether a copy was ever started
        self._copied: Any = None
        self._released: Any = None

    @property
    def num_bytes(self) -> int:
        """The bytes that the arena takes on the device, and once more on the host of a GPU."""
        return self._device.numel()

    def fill(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Start to bring tensors of the host to the device; return them as they will be there after `start_step`."""
        offsets, num_bytes = _lay_out(tensors)
        if self._is_copied:
            self._copier.wait_on_host(self._copied)
        if num_bytes > self.num_bytes:
            self._host, self._device = self._copier.allocate(int(num_bytes * _GROWTH))
        for tensor, offset in zip(tensors, offsets, strict=True):
            _view(self._host, offset, tensor).copy_(tensor)
        self._copied = self._copier.copy(self._host[:num_bytes], self._device[:num_bytes], self._released)
        self._is_copied = True
        return [_view(self._device, offset, tensor) for tensor, offset in zip(tensors, offsets, strict=True)]

    def start_step(self) -> None:
        """Let the step that is launched from now on wait for its input."""
        self._copier.wait_on_device(self._copied)

    def end_step(self) -> None:
        """Release the arena behind the step, which is launched."""
        self._released = self._copier.mark_computed()


def _lay_out(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the first byte of each tensor in an arena, and how many bytes all take."""
    offsets = []
    num_bytes = 0
    for tensor in tensors:
        offsets.append(num_bytes)
        num_bytes += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return offsets, num_bytes


def _view(arena: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return the bytes of an arena at `offset` as a tensor of the type and shape of `like`."""
    return arena[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
