"""Read what describes an Energon data set (Megatron-Energon): `.nv-meta` beside its WebDataset shards.

`split.yaml` names the shards of each split and what is left out; `dataset.yaml` names the type of its samples and the
members that hold their fields. Nothing in it is imported or executed.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.layouts import caption_to_conversation
from mmtrain.data.media.media_bytes import TarMember
from mmtrain.errors import DataError
from mmtrain.foreign_json import parse_json
from mmtrain.foreign_yaml import parse_yaml

META_FOLDER = ".nv-meta"
DEFAULT_SPLIT = "train"
_MAX_YAML_BYTES = 64 << 20  # a million shards
# Class of a data set or of its samples -> the fields that are used, the medium first; () for entries as they are.
_FIELDS_BY_CLASS = {
    **dict.fromkeys(("CaptioningWebdataset", "CaptioningSample"), ("image", "caption")),
    **dict.fromkeys(("VQAWebdataset", "VQASample"), ("image", "context", "answers")),
    **dict.fromkeys(("CrudeWebdataset", "CrudeSample"), ()),
}
_ACCESSOR = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")  # `json[answers][0]`: an extension and keys in its JSON

ReadMember = Callable[[TarMember], bytes]
_MAX_SHARDS_IN_RANGE = 1_000_000  # `{0..999999999999}` is a slip of the user's, and would fill the memory


def expand_braces(text: str) -> list[str]:
    """Return every text that `{a,b}` and `{000..123}` stand for, as in a shell.

    >>> expand_braces("x-{08..10}.{tar,txt}")[:3]
    ['x-08.tar', 'x-08.txt', 'x-09.tar']
    """
    braces = re.search(r"\{([^{}]*)\}", text)
    if braces is None:
        return [text]
    number_range = re.fullmatch(r"(\d+)\.\.(\d+)", braces[1])
    if number_range is None:
        choices = braces[1].split(",")
    else:
        low = int(number_range[1])
        high = int(number_range[2])
        if high - low >= _MAX_SHARDS_IN_RANGE:
            raise DataError(f"{text}: names more than {_MAX_SHARDS_IN_RANGE} shards")
        num_digits = len(number_range[1])
        choices = [str(number).zfill(num_digits) for number in range(low, high + 1)]
    tails = expand_braces(text[braces.end() :])
    if len(choices) * len(tails) > _MAX_SHARDS_IN_RANGE:
        raise DataError(f"{text}: names more than {_MAX_SHARDS_IN_RANGE} shards")
    return [f"{text[: braces.start()]}{choice}{tail}" for choice in choices for tail in tails]


@dataclass(frozen=True)
class EnergonDataset:
    """The shards of one split, and how the members of a sample become its entry."""

    shards: tuple[Path, ...]
    fields: Mapping[str, str]  # field -> accessor; empty: the members are those of any WebDataset
    excluded: Mapping[str, frozenset[str]] = field(default_factory=dict)  # shard -> keys of samples left out

    def make_entry(self, by_extension: Mapping[str, TarMember], read: ReadMember) -> Any:
        """Make the entry of a sample from its members. Raises `BadSampleError` where a field is missing."""
        image = self._extension("image", by_extension)
        if "caption" in self.fields:
            return caption_to_conversation(
                {"caption": self._text("caption", by_extension, read), "images": [image]}, ["image"]
            )
        context = self._text("context", by_extension, read)
        asked: Any = context
        if context.count("<image>") != 1:  # what it spells is text
            asked = [{"type": "image"}, {"type": "text", "text": f"\n{context}"}]
        turns = [("user", asked), ("assistant", self._text("answers", by_extension, read))]
        return {"messages": [{"role": role, "content": content} for role, content in turns], "images": [image]}

    def _extension(self, name: str, by_extension: Mapping[str, TarMember]) -> str:
        """Return the first of the extensions that `jpg,png` names which the sample has."""
        extensions = [part.strip().lower() for part in re.split("[,;]", self._member(name))]
        for extension in extensions:
            if extension in by_extension:
                return extension
        has = ", ".join(by_extension)
        raise BadSampleError("malformed", f"no member for `{name}` ({', '.join(extensions)}); the sample has {has}")

    def _member(self, name: str) -> str:
        match = _ACCESSOR.fullmatch(self.fields[name])
        assert match is not None, "checked when the description was read"
        return match[1]

    def _text(self, name: str, by_extension: Mapping[str, TarMember], read: ReadMember) -> str:
        """Return the text of a field; of a list of answers, the first."""
        extension = self._extension(name, by_extension)
        content = read(by_extension[extension])
        keys = re.findall(r"\[([^\[\]]+)\]", self.fields[name])
        try:
            value: Any = parse_json(content) if keys or extension == "json" else content.decode("utf-8-sig").strip()
            for key in keys:
                value = value[int(key)] if isinstance(value, list) else value[key]
        except (ValueError, LookupError, TypeError) as error:
            what = f"`{name}` ({self.fields[name]}) cannot be read: {type(error).__name__}: {error}"
            raise BadSampleError("malformed", what) from None
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise BadSampleError(
                "malformed", f"`{name}` ({self.fields[name]}) is {type(value).__name__}, expected a text"
            )
        return value


def read_energon_folder(folder: Path, split: str | None) -> EnergonDataset | None:
    """Return the data set that a folder describes; None for any other folder.

    split: `train` by default. Raises `DataError` for a description that cannot be followed.
    """
    meta = folder / META_FOLDER
    if not meta.is_dir():
        return None
    splits = _read(meta / "split.yaml")
    parts = splits.get("split_parts")
    name = split or DEFAULT_SPLIT
    if not isinstance(parts, dict) or not isinstance(parts.get(name), list) or not parts[name]:
        found = ", ".join(str(part) for part, shards in parts.items() if shards) if isinstance(parts, dict) else "none"
        raise DataError(f"{meta / 'split.yaml'}: no shards of split {name}; it has {found}: set the source's `split`")
    excluded: dict[str, set[str]] = {}
    for entry in splits.get("exclude") or ():
        shard, _, key = str(entry).partition(".tar/")
        excluded.setdefault(f"{shard}.tar" if key else shard, set()).add(key)
    patterns = [str(pattern) for pattern in parts[name]]
    shards = [_shard_path(folder, shard) for pattern in patterns for shard in expand_braces(pattern)]
    return EnergonDataset(
        shards=tuple(folder / shard for shard in shards if "" not in excluded.get(shard, ())),
        fields=_fields(meta / "dataset.yaml"),
        excluded={str(folder / shard): frozenset(keys) for shard, keys in excluded.items()},
    )


def description_files(folder: Path) -> list[Path]:
    """Return the files that describe the data set of a folder; none of any other folder."""
    files = (folder / META_FOLDER / name for name in ("split.yaml", "dataset.yaml"))
    return [file for file in files if file.is_file()]


def _fields(path: Path) -> dict[str, str]:
    """Return the members that hold the fields of a sample."""
    described = _read(path)
    sample_type = described.get("sample_type")
    kinds = [described.get("__class__"), sample_type.get("__class__") if isinstance(sample_type, dict) else sample_type]
    known = [kind for kind in map(str, kinds) if kind in _FIELDS_BY_CLASS]
    if not known:
        raise DataError(
            f"{path}: samples of {' or '.join(str(kind) for kind in kinds if kind)} are not read; allowed: "
            f"{', '.join(_FIELDS_BY_CLASS)}. Convert them to crude entries with `messages`"
        )
    names = _FIELDS_BY_CLASS[known[-1]]
    if not names:
        return {}
    field_map = described.get("field_map")
    if not isinstance(field_map, dict):
        raise DataError(f"{path}: no `field_map` (a `sample_loader` is code, which is not run); name the members there")
    fields = {name: str(field_map.get(name, "")) for name in names}
    wrong = [name for name, accessor in fields.items() if not _ACCESSOR.fullmatch(accessor)]
    if wrong:
        found = fields[wrong[0]] or "nothing"
        raise DataError(f"{path}: field_map.{wrong[0]}: found {found}, allowed: an extension, or json[key][0]")
    return fields


def _shard_path(folder: Path, shard: str) -> str:
    """Return the path of a shard inside of its folder. Raises `DataError` for one that leads out."""
    if Path(shard).is_absolute() or ".." in Path(shard).parts:
        raise DataError(f"{folder / META_FOLDER / 'split.yaml'}: the shard {shard} is not in the data set's folder")
    return shard


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise DataError(f"{path}: above {_MAX_YAML_BYTES} bytes")
        values = parse_yaml(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; `energon prepare` writes it") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise DataError(f"{path}: found {type(values).__name__}, expected a mapping")
    return values
