"""Suggest an existing file for a path at which there is none."""

import difflib
import os
import threading
import unicodedata
from functools import lru_cache

_MAX_COMPARED_NAMES = 5_000  # comparing more takes seconds
_MAX_LISTED_NAMES = 200_000  # a folder of more is not listed for a message
_MAX_SUGGESTIONS = 100  # of one process: where a whole folder is missing, the first samples tell
_INVISIBLE = ("Cc", "Cf")  # categories of Unicode: control characters, zero-width ones
_suggesting = threading.Lock()
_num_suggestions = 0


def suggest_existing(path: str) -> str:
    """Return the end of a message about a missing file: the folder that is missing, or the most similar name."""
    global _num_suggestions
    folder, name = os.path.split(path)
    with _suggesting:
        if _num_suggestions >= _MAX_SUGGESTIONS:
            return ""
        _num_suggestions += 1
        missing_folder = _first_missing_folder(folder)
        if missing_folder is not None:
            parent, folder_name = os.path.split(missing_folder)
            nearest = _nearest(parent, folder_name)
            return f"; there is no folder {show_path(missing_folder)}{_question(folder_name, nearest)}"
        return _question(name, _nearest(folder, name))


def show_path(path: str) -> str:
    """Return a path for a message: in quotes and escapes where a name starts or ends with a blank, or is not seen."""
    has_blank_end = any(name != name.strip() for name in path.split("/"))
    return path if path.isprintable() and not has_blank_end else repr(path)


def _question(name: str, nearest: str | None) -> str:
    """Ask for the nearest name; both are written so that their difference is seen."""
    if nearest is None:
        return ""
    look_alike = _plain(name) == _plain(nearest) or name.isascii() != nearest.isascii()
    show = ascii if look_alike else repr
    return f"; did you mean {show(nearest)} in place of {show(name)}?"


def _first_missing_folder(folder: str) -> str | None:
    missing = None
    while folder and not os.path.isdir(folder):
        missing = folder
        parent = os.path.dirname(folder)
        if parent == folder:
            break
        folder = parent
    return missing


def _nearest(folder: str, name: str) -> str | None:
    names = _plain_names(folder or ".")
    plain_name = _plain(name)
    if plain_name in names:
        return names[plain_name]
    stem = plain_name.rpartition(".")[0]
    same_stem = next((plain for plain in names if stem and plain.rpartition(".")[0] == stem), None)
    if same_stem is not None:
        return names[same_stem]
    if len(names) > _MAX_COMPARED_NAMES:
        return None
    nearest = difflib.get_close_matches(plain_name, names, n=1, cutoff=0.75)
    return names[nearest[0]] if nearest else None


@lru_cache(maxsize=4)
def _plain_names(folder: str) -> dict[str, str]:
    """Return the names in a folder by their plain form; none of a folder that is too large or cannot be read."""
    names: dict[str, str] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                names[_plain(entry.name)] = entry.name
                if len(names) > _MAX_LISTED_NAMES:
                    return {}
    except OSError:
        return {}
    return names


def _plain(name: str) -> str:
    """Return a name without upper case, differences of Unicode's forms, and what is not seen of it."""
    seen = [character for character in name if unicodedata.category(character) not in _INVISIBLE]
    return " ".join(unicodedata.normalize("NFKC", "".join(seen)).casefold().split())
