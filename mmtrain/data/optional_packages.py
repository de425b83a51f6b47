"""Import packages that only some kinds of data need, and tell their misuse from bad data."""

import importlib
import importlib.metadata
import re
import traceback
from pathlib import Path
from types import ModuleType

from mmtrain.errors import DataError

_PACKAGE = str(Path(__file__).parents[1])  # where mmtrain's own code is
# What Python, its C functions and Cython say of arguments that a function does not take.
_WRONG_ARGUMENTS = re.compile(
    r"(unexpected|invalid) keyword argument|positional argument|missing .*required|multiple values for"
    r"|(takes|expected) (no|at most|at least|exactly|\d+)\b.* argument"
)


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


def check_package_fits(error: Exception, *packages: str) -> None:
    """Raise `DataError` if an error shows that one of the installed `packages` is not the one that mmtrain calls.

    Decoders raise errors of any type for damaged files, so whoever reads these takes each error for bad data. What no
    content of a file can cause must be excluded first: or a renamed keyword costs all the samples that need it.
    """
    if not _is_misuse(error):
        return
    versions = " or ".join(map(_with_version, packages))
    raise DataError(
        f"{versions} cannot be called as mmtrain calls it ({type(error).__name__}: {error}); install a "
        "version that mmtrain supports: `mmtrain doctor` names it"
    ) from error


def _with_version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} of an unknown version"


def _is_misuse(error: Exception) -> bool:
    """Return whether an error is about names and arguments in code, as opposed to values."""
    if isinstance(error, TypeError):
        return _WRONG_ARGUMENTS.search(str(error)) is not None
    if isinstance(error, AttributeError):
        is_of_module = isinstance(error.obj, ModuleType)
        # None has no attribute where something is missing in a file.
        return is_of_module or (error.obj is not None and _is_raised_by_us(error))
    return isinstance(error, NameError | ImportError)


def _is_raised_by_us(error: Exception) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_PACKAGE)
