"""A folder of latent images: what a frozen autoencoder makes of the images that a generator learns to draw.

An image is known by a hash of its file's bytes, so latents outlive a move of the data, and an image that changed has
none. `latents.bin` holds one record after another, and `keys.bin` the hash of each. A record is written before its
hash: what a run that was killed leaves behind is complete up to the last hash, and the next run goes on from there.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mmtrain.data.media.images import Float32Array, read_image_bytes
from mmtrain.data.media.media_bytes import Media
from mmtrain.errors import DataError, writing

HEADER_FILE = "latents.json"
_RECORDS_FILE, _KEYS_FILE = "latents.bin", "keys.bin"
_KEY_BYTES = 16
_DTYPE = np.dtype("<f2")  # latents have about unit variance, and noise is added to them: 11 bits are enough
COMMAND = "mmtrain data latents"


@dataclass(frozen=True)
class LatentHeader:
    """What all latents of a folder have in common."""

    image_size: int  # side in pixels
    channels: int
    side: int  # in positions of the latent
    encoder_hash: str | None  # of the weights that made them; None: any

    @property
    def record_elements(self) -> int:
        """Return the numbers of one latent image."""
        return self.channels * self.side**2


def image_key(media: Media) -> bytes:
    """Return the hash of an image's bytes. Raises BadImageError."""
    return hashlib.blake2b(read_image_bytes(media), digest_size=_KEY_BYTES).digest()


class LatentReader:
    """Latents by the images that they were made of. Files are opened at the first read, once in a process."""

    def __init__(self, folder: Path, expected: LatentHeader) -> None:
        """Read from a folder whose latents must be `expected`."""
        self._folder, self._expected = folder, expected

    def read(self, media: Media) -> Float32Array | None:
        """Return the latent image (channels, side, side) of an image; None if it has none.

        Raises BadImageError for an image that cannot be read, DataError for a folder that cannot be used.
        """
        rows, records = _open_records(self._folder, self._expected)
        row = rows.get(image_key(media))
        if row is None:
            return None
        latent: Float32Array = records[row].astype(np.float32)
        return latent

    def missing(self, media: Media) -> DataError:
        """Return the error for an image without a latent."""
        return DataError(
            f"{media}: {self._folder} has no latent of this image (model.generator.latents); run `{COMMAND}` on this "
            "recipe again, which adds those that are missing"
        )


@lru_cache(maxsize=2)  # of training and validation; every step has a reader of its own
def _open_records(folder: Path, expected: LatentHeader) -> tuple[dict[bytes, int], npt.NDArray[np.float16]]:
    """Return the number of each image's record, and all records (n, channels, side, side), which stay on disk."""
    check_header(folder, expected)
    rows = read_keys(folder)
    shape = (len(rows), expected.channels, expected.side, expected.side)
    if not rows:
        return rows, np.empty(shape, dtype=_DTYPE)
    path = folder / _RECORDS_FILE
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; run `{COMMAND}` again") from None
    needed = len(rows) * expected.record_elements * _DTYPE.itemsize
    if num_bytes < needed:
        raise DataError(f"{path} has {num_bytes} bytes, but {len(rows)} latents take {needed}; copy it again")
    return rows, np.memmap(path, dtype=_DTYPE, mode="r", shape=shape)


class LatentWriter:
    """Adds latents to a folder. Use it as a context manager."""

    def __init__(self, folder: Path, header: LatentHeader) -> None:
        """Add to a folder, which is made if it does not exist.

        Raises DataError if it holds latents of another kind, UserError if it cannot be written.
        """
        with writing("model.generator.latents", folder, "latents"):
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / HEADER_FILE).exists():
                check_header(folder, header)
            else:
                (folder / HEADER_FILE).write_text(json.dumps(asdict(header), indent=2) + "\n", encoding="utf-8")
            self.keys = set(read_keys(folder))
            self._records = (folder / _RECORDS_FILE).open("ab")
            self._keys = (folder / _KEYS_FILE).open("ab")
            self._records.truncate(len(self.keys) * header.record_elements * _DTYPE.itemsize)
            self._keys.truncate(len(self.keys) * _KEY_BYTES)
        self._folder = folder

    def add(self, keys: Sequence[bytes], latents: Float32Array) -> None:
        """Add latents (n, channels, side, side) of images with these keys. Raises UserError."""
        with writing("model.generator.latents", self._folder, "latents"):
            self._records.write(latents.astype(_DTYPE).tobytes())
            self._records.flush()
            os.fsync(self._records.fileno())
            self._keys.write(b"".join(keys))
            self._keys.flush()
        self.keys.update(keys)

    def __enter__(self) -> "LatentWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.close()
        self._keys.close()


def read_keys(folder: Path) -> dict[bytes, int]:
    """Return the number of each image's record. The last hash may be cut off."""
    try:
        content = (folder / _KEYS_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"cannot read {folder / _KEYS_FILE}: {error.strerror}") from None
    return {content[i * _KEY_BYTES : (i + 1) * _KEY_BYTES]: i for i in range(len(content) // _KEY_BYTES)}


def check_header(folder: Path, expected: LatentHeader) -> None:
    """Raise DataError for a folder without latents, or with latents of another autoencoder or size."""
    path = folder / HEADER_FILE
    try:
        stored = LatentHeader(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise DataError(
            f"model.generator.latents: {folder} holds no latents ({HEADER_FILE} is missing); run `{COMMAND}` on this "
            "recipe first"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove the folder and run `{COMMAND}` again") from None
    differing = [
        f"{name} is {value} there, {wanted} in this recipe"
        for (name, value), wanted in zip(asdict(stored).items(), asdict(expected).values(), strict=True)
        if value != wanted and wanted is not None
    ]
    if differing:
        raise DataError(
            f"model.generator.latents: {folder} holds latents of another kind: {'; '.join(differing)}; name another "
            f"folder, and run `{COMMAND}` on this recipe"
        )
