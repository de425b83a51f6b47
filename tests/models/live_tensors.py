"""Count the bytes of tensors that a computation keeps alive, also on torch's `meta` device."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the tensors that operations make while it is active, each storage once; `peak` is the most at once.

    Those on the host only `on_host`.
    """

    def __init__(self, on_host: bool = False) -> None:
        super().__init__()
        self._on_host = on_host
        self._nbytes_of: dict[int, int] = {}
        self.nbytes = self.peak = 0

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave out these tensors, which last longer than the computation."""
        for tensor in tensors:
            self._nbytes_of[tensor.untyped_storage()._cdata] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            # Tensors that wrap others (DTensor) state the size of the whole and have no memory.
            if not isinstance(tensor, Tensor) or is_traceable_wrapper_subclass(tensor):
                continue
            if self._on_host or tensor.device.type != "cpu":
                self._see(tensor)
        self.peak = max(self.peak, self.nbytes)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._nbytes_of:
            self._nbytes_of[storage._cdata] = storage.nbytes()
            self.nbytes += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.nbytes -= self._nbytes_of.pop(key)
