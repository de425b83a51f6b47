"""Upload a folder that other programs open, such as one of Hugging Face, to an object store."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mmtrain.data.remote.object_store import ObjectStore

MARK = ".mmtrain-upload"  # in a folder of a store that is not complete
# Without these, no program opens a folder, so they come last.
_LAST = ("config.json", "adapter_config.json", "model_index.json", ".metadata")
_CHUNK_BYTES = 4 << 20


def is_uploaded(store: ObjectStore, prefix: str) -> bool:
    """Return whether the store holds a folder whole. Raises `RemoteReadError`."""
    sizes = store.sizes(prefix)
    return bool(sizes) and f"{prefix}/{MARK}" not in sizes


def upload_folder(store: ObjectStore, folder: Path, prefix: str = "") -> None:
    """Upload all files of a folder to the folder `prefix` of a store; what a kill leaves there has a mark.

    Raises `RemoteReadError` and OSError.
    """
    before = f"{prefix}/" if prefix else ""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    store.write(f"{before}{MARK}", lambda: [b"not complete\n"])
    for path in sorted(files, key=lambda path: path.name in _LAST):
        store.write(f"{before}{path.relative_to(folder).as_posix()}", partial(_chunks, path))
    store.remove(f"{before}{MARK}")


def remove_folder(store: ObjectStore, prefix: str) -> None:
    """Remove a folder of a store, if there is one; what a kill leaves has a mark. Raises `RemoteReadError`."""
    names = store.sizes(prefix)
    if not names:
        return
    mark = f"{prefix}/{MARK}"
    store.write(mark, lambda: [b"not complete\n"])
    names.setdefault(mark, 0)
    for name in sorted(names, key=lambda name: name.endswith(f"/{MARK}")):
        store.remove(name)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
