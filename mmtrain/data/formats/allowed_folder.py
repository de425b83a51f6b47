"""Paths named by data: open only files below one folder, and never fetch anything.

Data from elsewhere must neither make us read (and train on) any file of this machine, nor ask the network for one.
"""

import os
import posixpath
import re
import stat
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote

from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.media.media_bytes import FileMedia
from mmtrain.recipe.settings.source_path import RemotePath

# Names separated by single slashes, without leading dots and colons: such a path is no URL and is already normalized.
_PLAIN_PATH = re.compile(r"(?:[^/.:\0][^/:\0]*/)*[^/.:\0][^/:\0]*")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://|(?:data|file|blob|about|javascript|pipe|fd|concat|https?|ftps?):", re.I)
_Place = Literal["there", "missing", "outside"]  # of a path: nothing is there, or its links lead outside
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

        Where there is none of this name, it may be written with `%20` and the like, or in another Unicode normal form.

        Raises `BadSampleError` of kind `<kind>_url` for a URL, and `<kind>_path` for a path that leads outside.
        """
        if _PLAIN_PATH.fullmatch(path):
            full = f"{self._root_prefix}{path}"
            place = self._look_at(full)
            if place != "outside":
                return FileMedia(full if place == "there" else self._other_spelling(path, full))
        _reject_url(kind, path)
        full = os.path.normpath(os.path.join(self._root, path))
        if full == self._root:
            raise BadSampleError(f"{kind}_path", f"{path!r} is the {kind} folder itself; name a file in it")
        if "\0" in path or not _is_below(full, self._root):
            raise BadSampleError(f"{kind}_path", f"{path!r} lies outside of the {kind} folder {self._root}")
        place = self._look_at(full)
        if place == "outside":
            reason = f"{path!r} leads outside of the {kind} folder {self._root} by a symbolic link"
            raise BadSampleError(f"{kind}_path", f"{reason}; set the source's image_root to a folder that holds both")
        return FileMedia(full if place == "there" else self._other_spelling(path, full))

    def _other_spelling(self, path: str, full: str) -> str:
        """Return the existing file inside whose name is another spelling of `path`; `full` if there is none."""
        for spelling in _other_spellings(path):
            other = os.path.normpath(os.path.join(self._root, spelling))
            if _is_below(other, self._root) and self._look_at(other) == "there":
                return other
        return full

    def _look_at(self, full: str) -> _Place:
        folder = full.rpartition(os.sep)[0]
        if folder not in self._is_inside:
            some_file = os.path.join(os.path.realpath(folder), "file")
            self._is_inside[folder] = _is_below(some_file, self._resolved_root)
        if not self._is_inside[folder]:
            return "outside"
        try:
            is_link = stat.S_ISLNK(os.lstat(full).st_mode)
        except (OSError, ValueError):  # whoever opens it says what is wrong
            return "missing"
        return "outside" if is_link and not _is_below(os.path.realpath(full), self._resolved_root) else "there"


class RemoteFolder:
    """The remote folder below which all media of one source must lie."""

    def __init__(self, root: RemotePath) -> None:
        """Resolve paths from `root`: the `image_root` of a source, or the folder of its file."""
        self._root = str(root).rstrip("/")
        self._is_http = root.protocol in ("http", "https")

    def file(self, kind: str, path: str) -> FileMedia:
        """Return the file that a sample names; whoever opens it finds out whether it is there.

        Raises `BadSampleError` of kind `<kind>_url` for a URL, and `<kind>_path` for a path that leads outside.
        """
        _reject_url(kind, path)
        plain = posixpath.normpath(unquote(path) if self._is_http else path)
        if plain == ".":
            raise BadSampleError(f"{kind}_path", f"{path!r} is the {kind} folder itself; name a file in it")
        if plain.startswith("/") or plain.split("/")[0] == ".." or not plain.isprintable():
            raise BadSampleError(f"{kind}_path", f"{path!r} lies outside of the {kind} folder {self._root}")
        return FileMedia(f"{self._root}/{quote(plain) if self._is_http else plain}")


MediaFolder = AllowedFolder | RemoteFolder


def _reject_url(kind: str, path: str) -> None:
    if _URL.match(path):
        shown = path if len(path) <= _MAX_SHOWN_URL_CHARACTERS else f"{path[:_MAX_SHOWN_URL_CHARACTERS]}..."
        raise BadSampleError(f"{kind}_url", f"{shown!r} is a URL; download it and give its path")


def _other_spellings(path: str) -> Iterator[str]:
    """Yield what a path may be meant to be: without percent-encoding, and in the normal forms of Linux and of macOS."""
    plain = unquote(path) if "%" in path else path
    if "\0" in plain or (plain == path and path.isascii()):
        return
    for spelling in dict.fromkeys((path, plain)):
        yield spelling
        yield unicodedata.normalize("NFC", spelling)
        yield unicodedata.normalize("NFD", spelling)


def _is_below(path: str, root: str) -> bool:
    return path.startswith(root if root.endswith(os.sep) else root + os.sep)
