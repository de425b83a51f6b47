"""Import packages that only some kinds of data need."""

import importlib
from types import ModuleType

from mmtrain.errors import DataError


def require_package(module: str, extra: str, what: str) -> ModuleType:
    """Import `module`.

    Raises `DataError` if it is not installed: `what` needs it, and `pip install 'mmtrain[extra]'` installs it.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):  # OSError: the package is installed, but a library that it loads is not
        package = module.partition(".")[0]
        raise DataError(
            f"{what} needs the `{package}` package, which is not installed here: pip install 'mmtrain[{extra}]'"
        ) from None
