"""Turn what goes wrong while a medium is opened or decoded into the one error that sets its sample aside."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, BinaryIO

from mmtrain.data.media.media_bytes import BadMediaError, Media, NotAFileError, describe_missing
from mmtrain.data.optional_packages import check_package_fits
from mmtrain.errors import DataError, RemoteReadError


@contextmanager
def media_errors(media: Media, bad: type[BadMediaError], broken: str) -> Iterator[None]:
    """Turn every error in the body of the `with` into a `bad` one, of kind `broken` where nothing else is known.

    Errors of a remote source stay as they are. An error that shows that a package does not fit mmtrain's calls becomes
    a `DataError`, also where one such `with` is inside another.
    """
    try:
        yield
    except FileNotFoundError:
        raise bad(bad.missing_kind, describe_missing(media)) from None
    except NotAFileError as error:
        raise bad(bad.other_kind, f"{media}: {error}") from None
    except (BadMediaError, DataError, RemoteReadError):
        raise
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error, ...
        check_package_fits(error, *bad.packages)
        # The libraries' own messages, without the name or the number of our stream.
        why = getattr(error, "error_string", None) or getattr(error, "strerror", None) or error
        raise bad(broken, f"{media}: {type(error).__name__}: {why}") from None


def open_container(av: ModuleType, file: BinaryIO, formats: str, **options: Any) -> Any:
    """Open a file in one of these formats by PyAV: it may name no other file or host, and its tags may be of any text.

    PyAV 19 reads tags that are no UTF-8 without being asked, and has no argument for it any more.
    """
    if int(av.__version__.partition(".")[0]) < 19:
        options["metadata_errors"] = "ignore"
    return av.open(file, container_options={"format_whitelist": formats, "protocol_whitelist": "none"}, **options)
