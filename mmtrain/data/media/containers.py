"""Open a file of sound or pictures with FFmpeg."""

from types import ModuleType
from typing import Any, BinaryIO


def open_container(av: ModuleType, file: BinaryIO, formats: str, **options: Any) -> Any:
    """Open a file in one of these formats by PyAV: it may name no other file or host, and its tags may be of any text.

    PyAV 19 reads tags that are no UTF-8 without being asked, and has no argument for it any more.
    """
    if int(av.__version__.partition(".")[0]) < 19:
        options["metadata_errors"] = "ignore"
    return av.open(file, container_options={"format_whitelist": formats, "protocol_whitelist": "none"}, **options)
