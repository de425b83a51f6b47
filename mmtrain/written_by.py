"""Say of a file in another format which version of mmtrain wrote it, and which one reads it now.

Plans, cost tables and checkpoints hold a number of their format and, under `WRITTEN_BY`, the version of mmtrain that
wrote them. CONTRIBUTING.md (Compatibility) says when the number rises.
"""

from mmtrain.version import __version__

WRITTEN_BY = "mmtrain"  # key in each of these files
OTHER_FORMAT = "is of format"  # how the message starts


def describe_other_format(found: object, writer: object, readable: int) -> str:
    """Return `is of format 3, written by mmtrain 0.4.0; this is mmtrain 0.1.0, which reads format 2`.

    Args:
        found: the number in the file; None if it has none.
        writer: what the file has under `WRITTEN_BY`; None if it has nothing.
        readable: the number that this version reads.
    """
    version = f"mmtrain {writer}" if writer is not None else "an unknown version of mmtrain"
    return f"{OTHER_FORMAT} {found}, written by {version}; this is mmtrain {__version__}, which reads format {readable}"


def describe_writer(writer: object) -> str:
    """Return a remark about a file of a readable format that has an error; empty if this version wrote it."""
    if writer is None or writer == __version__:
        return ""
    return f" (written by mmtrain {writer}; this is mmtrain {__version__})"
