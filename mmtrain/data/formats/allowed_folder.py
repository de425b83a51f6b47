"""Paths that stand in data: only files below one folder are opened, and nothing is fetched.

Data from elsewhere must not make us read any file of this machine (and train on it), or ask the network for one.
"""

import os
import re
from pathlib import Path

from mmtrain.data.formats.conversation import BadSampleError
from mmtrain.data.media.media_bytes import FileMedia

# Names one below the other, without dots in front, colons and nothing between slashes: no URL, and normal as it stands.
_PLAIN = re.compile(r"(?:[^/.:\0][^/:\0]*/)*[^/.:\0][^/:\0]*")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|(?:data|file|blob|about|javascript|pipe|fd|concat|https?|ftps?):", re.I)


class AllowedFolder:
    """The folder that media of one source lie below, links resolved."""

    def __init__(self, root: Path) -> None:
        """Take paths from `root` on, the `image_root` of a source or the folder of its file."""
        self._root = os.path.abspath(root)
        self._below = self._root if self._root.endswith(os.sep) else self._root + os.sep
        self._real = os.path.realpath(root)
        self._inside: dict[str, bool] = {}  # by folder: whether, links resolved, it lies below the root

    def file(self, kind: str, path: str) -> FileMedia:
        """The file that a sample names. Raises `BadSampleError` of kind `<kind>_url` or `<kind>_path`."""
        if _PLAIN.fullmatch(path) and self._leads_inside(full := f"{self._below}{path}"):
            return FileMedia(full)
        if _URL.match(path):
            shown = path if len(path) <= 200 else f"{path[:200]}..."
            raise BadSampleError(f"{kind}_url", f"{shown!r} is a URL; download it and give its path")
        full = os.path.normpath(os.path.join(self._root, path))
        if "\0" in path or not _below(full, self._root):
            raise BadSampleError(f"{kind}_path", f"{path!r} lies outside of the {kind} folder {self._root}")
        if not self._leads_inside(full):
            reason = f"{path!r} leads outside of the {kind} folder {self._root} by a symbolic link"
            raise BadSampleError(f"{kind}_path", f"{reason}; set the source's image_root to a folder that holds both")
        return FileMedia(full)

    def _leads_inside(self, full: str) -> bool:
        folder = full.rpartition(os.sep)[0]
        if folder not in self._inside:
            self._inside[folder] = _below(os.path.join(os.path.realpath(folder), "file"), self._real)
        return self._inside[folder] and (not os.path.islink(full) or _below(os.path.realpath(full), self._real))


def _below(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)
