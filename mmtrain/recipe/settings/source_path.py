"""Where a source's files are: a path of this machine, or the URL of a file elsewhere."""

import posixpath
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.IGNORECASE | re.DOTALL)
_HUB_SPLIT = re.compile(r"(hf://datasets/[^/?#]+/[^/?#]+)/?\?split=([\w.-]+)", re.IGNORECASE)
_LOCAL_PROTOCOLS = ("file", "local")
READ_ONLY_PROTOCOLS = ("http", "https", "hf")  # as data is read: a model's repository takes commits, not files


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set on the Hugging Face hub."""

    data_set: str  # `hf://datasets/org/name`, or `.../name@revision`
    split: str

    def __str__(self) -> str:
        return f"{self.data_set}?split={self.split}"


@dataclass(frozen=True, order=True)
class RemotePath:
    """The URL of a file or a folder that `fsspec` reads, with those properties of `pathlib.PurePath` that sources need.

    Nothing is opened here: see `mmtrain.data.remote`.
    """

    url: str

    @property
    def hub_split(self) -> HubSplit | None:
        """The split of a data set that the URL names; None for any other URL."""
        match = _HUB_SPLIT.fullmatch(self.url)
        return None if match is None else HubSplit(match[1], match[2])

    @property
    def protocol(self) -> str:
        """The part in front of `://`, in lower case."""
        return self.url.partition("://")[0].lower()

    @property
    def parts(self) -> tuple[str, ...]:
        """Protocol and host (or bucket), and the names behind them."""
        protocol, _, rest = self.url.partition("://")
        host, *names = rest.rstrip("/").split("/")
        return (f"{protocol}://{host}", *names)

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1]

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot; empty without one."""
        return posixpath.splitext(self.name)[1]

    @property
    def parent(self) -> "RemotePath":
        """The folder of the file; of a host or a bucket, itself."""
        return RemotePath("/".join(self.parts[:-1] or self.parts))

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url


def is_url(text: str) -> bool:
    """Return whether a text names a place by its protocol, as `https://host/file` does."""
    return _URL.match(text) is not None


def parse_source_path(value: object) -> Path | RemotePath:
    """Turn the URL of a remote file into a `RemotePath`, and any other text into a `Path`.

    Raises ValueError for URLs that hold credentials or more than a place. The message never repeats such a URL.
    """
    if isinstance(value, Path):  # a URL given as a path has lost a slash
        value = re.sub(r"^([a-z][a-z0-9+.-]+):/(?=[^/])", r"\1://", str(value), flags=re.IGNORECASE)
    if isinstance(value, RemotePath):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("path_type", "Input is not a valid path")
    match = _URL.fullmatch(value)
    if match is None:
        return Path(value)
    protocol = match[1].lower()
    host, _, names = match[2].partition("/")
    if "@" in host:
        raise ValueError(
            f"found a {protocol} URL with a user name or password; allowed: credentials in the environment only, since "
            "recipes are copied into logs and checkpoints"
        )
    if protocol == "hf" and "?" in match[2]:
        hub_split = RemotePath(f"{protocol}://{match[2]}").hub_split
        if hub_split is None:
            raise ValueError(
                "found an hf URL with `?`; allowed: a split of a data set, as hf://datasets/org/name?split=train, or "
                "the plain path of files"
            )
        return RemotePath(str(hub_split))
    if "?" in match[2] or "#" in match[2]:
        raise ValueError(
            f"found a {protocol} URL with `?` or `#`, which often hold credentials; allowed: protocol, host and path, "
            "with credentials in the environment"
        )
    if "::" in match[2]:
        raise ValueError("found a chain of URLs (`::`); allowed: the URL of one file, one folder or a pattern")
    if ".." in names.split("/"):
        raise ValueError("found `..` in a URL; allowed: the plain path")
    if protocol in _LOCAL_PROTOCOLS:
        return Path(f"/{names}" if host in ("", "localhost") else f"{host}/{names}")
    if not host and protocol != "memory":
        raise ValueError(f"found a {protocol} URL without a host or bucket; allowed: {protocol}://host/path")
    return RemotePath(f"{protocol}://{match[2]}")


SourcePath = Annotated[
    Path | RemotePath,
    PlainValidator(parse_source_path),  # recipes are validated as JSON, in which no value is an instance of these
    PlainSerializer(str, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "path"}),
]


def require_object_store(name: str, place: Path | RemotePath) -> str:
    """Return the URL of an object store that files can be written to. Raises ValueError for any other place."""
    if isinstance(place, RemotePath) and place.protocol not in READ_ONLY_PROTOCOLS:
        return place.url.rstrip("/")
    found = f"the protocol {place.protocol}" if isinstance(place, RemotePath) else f"the path {place}"
    raise ValueError(
        f"{name}: found {found}; allowed: the URL of an object store that takes files, as s3://bucket/run, "
        "gs://bucket/run or az://container/run"
    )
