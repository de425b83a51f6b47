"""Packages that only some data needs."""

import importlib
from types import ModuleType

from mmtrain.errors import DataError


def require_package(module: str, extra: str, what: str) -> ModuleType:
    """Import `module`; `DataError` says what needs it and which extra of mmtrain brings it."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):  # OSError: the package is there, a library it loads is not
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the `{package}` package, which is not installed here: pip install 'mmtrain[{extra}]'"
        ) from None
