"""Let Megatron-core be imported where Triton is not installed, as beside torch's builds for CPUs.

From 0.18 on, modules that every run imports define Triton kernels, for experts and inference. Nothing calls them here.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


class _StandIn(ModuleType):
    """Has every name that defining a kernel needs: its decorators leave functions as they are."""

    __version__ = "0"  # Megatron-core leaves out what needs a newer one
    language: ModuleType

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _leave_as_it_is


def _leave_as_it_is(function: Any = None, **_: object) -> Any:
    """Return a function as a decorator does that changes nothing, with options or without."""
    return function if callable(function) else _leave_as_it_is


@contextlib.contextmanager
def triton_stands_in() -> Iterator[None]:
    """Give `import triton` something to find in the body of the `with`; it does nothing where Triton is installed.

    Afterwards Triton is missing as before, since other libraries look for it to see whether they can use it.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton = _StandIn("triton")
    triton.language = _StandIn("triton.language")
    stand_ins: dict[str, ModuleType] = {"triton": triton, "triton.language": triton.language}
    before = {name: sys.modules[name] for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(before)
