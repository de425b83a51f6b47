"""Copy weights and moments to the host while the next step computes its gradients: only its update may change them."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_STAGING_BYTES = 256 * 2**20  # of pinned memory in each of two buffers: a whole snapshot would pin most of a host


class _Piece(NamedTuple):
    """A part of a tensor on its way to the host."""

    staged: Tensor  # in pinned memory; on a CPU, the live tensor
    target: Tensor
    arrived: torch.cuda.Event | None


class SnapshotCopy:
    """Copies of live tensors in host memory. They hold what the tensors held when this was made, after `run`.

    Until `wait` returns no live tensor may change.
    """

    def __init__(self, live: Sequence[Tensor]) -> None:
        """Allocate the copies, and on a GPU the buffers on the way; `run`, in a thread, fills them."""
        self.copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in live]
        self._live = live
        self._is_done = threading.Event()
        self._device = next((tensor.device for tensor in live if tensor.is_cuda), None)
        self._computed: torch.cuda.Event | None = None
        self._buffers: deque[Tensor] = deque()
        if self._device is not None:  # what was launched before must have changed the tensors
            with torch.cuda.device(self._device):
                self._buffers += [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed.record(torch.cuda.current_stream(self._device))

    def run(self) -> None:
        """Copy all tensors, on a GPU through pinned memory and on a stream beside that of the step."""
        try:
            pieces = self._host_pieces() if self._device is None else self._staged_pieces(self._device)
            for piece in pieces:
                if piece.arrived is not None:
                    piece.arrived.synchronize()
                piece.target.copy_(piece.staged)
        finally:
            self._is_done.set()  # also after an error: training goes on without this checkpoint

    def wait(self) -> None:
        """Wait until the live tensors may change."""
        self._is_done.wait()

    def _host_pieces(self) -> Iterator[_Piece]:
        for live, copy in zip(self._live, self.copies, strict=True):
            yield _Piece(live.detach(), copy, None)

    def _staged_pieces(self, device: torch.device) -> Iterator[_Piece]:
        """Yield pieces of all tensors, each while the next one is on its way."""
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        assert self._computed is not None
        stream.wait_event(self._computed)
        on_their_way: deque[tuple[_Piece, Tensor]] = deque()
        for live, target in self._parts():
            if not self._buffers:
                piece, buffer = on_their_way.popleft()
                yield piece
                self._buffers.append(buffer)
            buffer = self._buffers.popleft()
            staged = buffer[: live.nbytes].view(live.dtype)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                staged.copy_(live, non_blocking=True)
                arrived.record(stream)
            on_their_way.append((_Piece(staged, target, arrived), buffer))
        yield from (piece for piece, _ in on_their_way)

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield flat parts that fit into a buffer, live and copy."""
        for live, copy in zip(self._live, self.copies, strict=True):
            num_elements = _STAGING_BYTES // live.element_size()
            live_parts = torch.split(live.detach().reshape(-1), num_elements)
            yield from zip(live_parts, torch.split(copy.view(-1), num_elements), strict=True)
