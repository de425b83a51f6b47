"""Find code of other packages by the name of an entry point, or as `module:function`, and name it when it fails.

docs/plugins.md has the protocol of each kind.
"""

import contextlib
import importlib
import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from mmtrain.errors import MmtrainError, PluginError, UserError

PluginKind = Literal["loggers", "hooks", "metrics", "formats", "families"]


@dataclass(frozen=True)
class Plugin:
    """Code of another package that a recipe names, or that its package registers."""

    kind: PluginKind
    name: str  # as the recipe has it
    origin: str  # where its code is, for errors: `mmtrain-example 1.0, mmtrain_example:Loss`
    value: Any

    def __str__(self) -> str:
        return f"plug-in {self.name} ({self.origin})"

    @contextlib.contextmanager
    def errors_named(self, where: str) -> Iterator[None]:
        """Let an exception of the plug-in say whose it is, and where it came. Raises PluginError."""
        try:
            yield
        except MmtrainError:
            raise
        except Exception as error:
            raise PluginError(f"{self}: {where}: {type(error).__name__}: {error}") from error


def installed_plugins(kind: PluginKind) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of installed packages in the group `mmtrain.<kind>`, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group=f"mmtrain.{kind}")}


@cache
def find_plugin(kind: PluginKind, name: str, setting: str) -> Plugin:
    """Import the plug-in of this name, or `module:function`.

    setting: the dotted key that names it, for errors.

    Raises UserError if there is none, and PluginError if it cannot be imported.
    """
    if ":" in name:
        return _load_reference(kind, name, setting)
    points = installed_plugins(kind)
    if name not in points:
        known = f"installed: {', '.join(sorted(points))}" if points else "none is installed"
        raise UserError(
            f"{setting}: there is no plug-in {name} in the entry points of the group mmtrain.{kind} ({known}); install "
            "its package, or name it as module:function"
        )
    point = points[name]
    package = f"{point.dist.name} {point.dist.version}, " if point.dist is not None else ""
    origin = f"{package}{point.value}"
    try:
        return Plugin(kind, name, origin, point.load())
    except Exception as error:
        raise PluginError(f"plug-in {name} ({origin}): its import: {type(error).__name__}: {error}") from error


def _load_reference(kind: PluginKind, name: str, setting: str) -> Plugin:
    module_name, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # a package that it needs
            raise PluginError(f"plug-in {name}: its import: {type(error).__name__}: {error}") from error
        raise UserError(
            f"{setting}: {name}: there is no module {error.name}; install its package, or add its folder to PYTHONPATH"
        ) from None
    except Exception as error:
        raise PluginError(f"plug-in {name}: its import: {type(error).__name__}: {error}") from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise UserError(f"{setting}: {name}: {module_name} has no {path}")
        value = getattr(value, part)
    return Plugin(kind, name, getattr(importlib.import_module(module_name), "__file__", None) or module_name, value)
