"""Paths named by data: open only files below one folder, and never fetch anything.

Data from elsewhere must neither make us read (and train on) any file of this machine, nor ask the network for one.
"""

import os
import re
from pathlib import Path

from mmtrain.data.formats.conversation import BadSampleError
from mmtrain.data.media.media_bytes import FileMedia

# Names separated by single slashes, without leading dots and colons: such a path is no URL and is already normalized.
_PLAIN_PATH = re.compile(r"(?:[^/.:\0][^/:\0]*/)*[^/.:\0][^/:\0]*")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|(?:data|file|blob|about|javascript|pipe|fd|concat|https?|ftps?):", re.I)
_MAX_SHOWN_URL_CHARACTERS = 200  # a `data:` URL may hold a whole image


class AllowedFolder:
    """The folder below which all media of one source must lie, symbolic links resolved."""

    def __init__(self, root: Path) -> None:
        """Resolve paths from `root`: the `image_root` of a source, or the folder of its file."""
        self._root = os.path.abspath(root)
        self._root_prefix = self._root if self._root.endswith(os.sep) else self._root + os.sep
        self._resolved_root = os.path.realpath(root)
        self._is_inside: dict[str, bool] = {}  # folder -> whether it lies below the root, links resolved

    def file(self, kind: str, path: str) -> FileMedia:
        """Return the file that a sample names.

        Raises `BadSampleError` of kind `<kind>_url` for a URL, and `<kind>_path` for a path that leads outside.
        """
        if _PLAIN_PATH.fullmatch(path):
            full = f"{self._root_prefix}{path}"
            if self._leads_inside(full):
                return FileMedia(full)
        if _URL.match(path):
            shown = path if len(path) <= _MAX_SHOWN_URL_CHARACTERS else f"{path[:_MAX_SHOWN_URL_CHARACTERS]}..."
            raise BadSampleError(f"{kind}_url", f"{shown!r} is a URL; download it and give its path")
        full = os.path.normpath(os.path.join(self._root, path))
        if "\0" in path or not _is_below(full, self._root):
            raise BadSampleError(f"{kind}_path", f"{path!r} lies outside of the {kind} folder {self._root}")
        if not self._leads_inside(full):
            reason = f"{path!r} leads outside of the {kind} folder {self._root} by a symbolic link"
            raise BadSampleError(f"{kind}_path", f"{reason}; set the source's image_root to a folder that holds both")
        return FileMedia(full)

    def _leads_inside(self, full: str) -> bool:
        folder = full.rpartition(os.sep)[0]
        if folder not in self._is_inside:
            some_file = os.path.join(os.path.realpath(folder), "file")
            self._is_inside[folder] = _is_below(some_file, self._resolved_root)
        if not self._is_inside[folder]:
            return False
        return not os.path.islink(full) or _is_below(os.path.realpath(full), self._resolved_root)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)
