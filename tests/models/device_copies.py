"""Watch what a stage copies between host and device, on a machine without a GPU: on torch's `meta` device.

(FakeTensor with `device="cuda"` would be nearer, but a CPU build of torch aborts in its autograd.)
"""

import traceback
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mmtrain

META = torch.device("meta")
_PACKAGE = Path(mmtrain.__file__).parent
_COPIES = ("_to_copy", "copy_")
T = TypeVar("T")


class DeviceCopies(TorchDispatchMode):
    """Records each copy between host and device, and each read of a device scalar by the host, while it is active.

    `found` holds texts such as `models/attention.py:rotary_tables: blocking copy cpu -> meta`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self._hidden_copies = _HiddenCopies(self.found)

    def __enter__(self) -> Self:
        self._hidden_copies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hidden_copies.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense" and args[0].device.type != "cpu":
            self.found.add(f"{_product_line()}: read of a scalar")
        if name in _COPIES:
            source, target = _devices(name, args, kwargs)
            if source != target:
                is_async = bool(kwargs.get("non_blocking")) or (name == "copy_" and len(args) > 2 and bool(args[2]))
                kind = "asynchronous" if is_async else "blocking"
                self.found.add(f"{_product_line()}: {kind} copy {source} -> {target}")
        elif {"cpu", "meta"} <= {arg.device.type for arg in args if isinstance(arg, Tensor) and arg.ndim}:
            self.found.add(f"{_product_line()}: {name} of tensors of host and device")  # an error on a GPU
        return func(*args, **kwargs)


class _HiddenCopies(TorchFunctionMode):
    """Adds copies that torch makes below its dispatcher: of numbers in `torch.tensor`, and of indices of the host."""

    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type != "cpu":
            self._found.add(f"{_product_line()}: constant from the host")
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].device.type != "cpu":
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_on_host, indices)):
                self._found.add(f"{_product_line()}: index from the host")
        return func(*args, **kwargs)


def _is_on_host(index: Any) -> bool:
    return isinstance(index, list) or (isinstance(index, Tensor) and index.device.type == "cpu")


def on_device(value: T, device: torch.device) -> T:
    """Move all tensors of a stage's input to the device."""
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}  # type: ignore[return-value]
    if is_dataclass(value) and not isinstance(value, type):
        moved = {field.name: on_device(getattr(value, field.name), device) for field in fields(value)}
        return replace(value, **moved)
    return value


def _devices(name: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[str, str]:
    """Return the types of the devices that a copy reads and writes."""
    if name == "copy_":
        return args[1].device.type, args[0].device.type
    source = args[0].device
    return source.type, torch.device(kwargs.get("device") or source).type


def _product_line() -> str:
    """Return the file and function of the product that asked for what is dispatched now."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(_PACKAGE))]
    assert frames, "a test, not the product, copied between host and device"
    return f"{Path(frames[-1].filename).relative_to(_PACKAGE)}:{frames[-1].name}"
