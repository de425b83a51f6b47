"""A folder of latent images: what a frozen autoencoder makes of the images that a generator learns to draw.

An image is known by a hash of its file's bytes, so latents outlive a move of the data, and an image that changed has
none. `latents.bin` holds one record after another, and `keys.bin` the hash of each. Where images are drawn in buckets
of several sizes, `sizes.bin` holds rows and columns of each record. A record and its size are written before its hash.
If a run is killed, its file is complete up to the last hash, and the next run continues there.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from mmtrain.balance import IntArray
from mmtrain.data.media.images import Float32Array, read_image_bytes
from mmtrain.data.media.media_bytes import Media
from mmtrain.durable_files import sync_file
from mmtrain.errors import DataError, writing
from mmtrain.recipe.settings.generator_settings import GeneratorSettings

HEADER_FILE = "latents.json"
_RECORDS_FILE, _KEYS_FILE, _SIZES_FILE = "latents.bin", "keys.bin", "sizes.bin"
_KEY_BYTES = 16
_SIZE_DTYPE = np.dtype("<u4")  # rows, then columns
_DTYPE = np.dtype("<f2")  # latents have about unit variance, and noise is added to them: 11 bits are enough
COMMAND = "mmtrain data latents"


@dataclass(frozen=True)
class LatentHeader:
    """What all latents of a folder have in common."""

    image_size: int  # side of a square in pixels
    channels: int
    side: int  # of a square in positions of the latent
    encoder_hash: str | None  # of the weights that made them; None: any
    bucket_step: int = 0  # see `GeneratorSettings`; 0: all images are squares
    max_aspect: float = 0.0  # likewise

    @classmethod
    def of(cls, settings: GeneratorSettings, encoder_hash: str | None) -> "LatentHeader":
        """Return what all latents have in common that an encoder makes for a generator."""
        assert settings.image_size is not None
        side = settings.image_size // settings.latent_scale
        step = settings.bucket_step or 0
        max_aspect = settings.max_aspect if step else 0.0
        return cls(settings.image_size, settings.channels, side, encoder_hash, step, max_aspect)


@dataclass(frozen=True)
class _Records:
    """The latents of a folder, which stay on disk."""

    numbers: dict[bytes, int]  # of the record of each image
    sizes: IntArray  # (n, 2) rows and columns of each record
    starts: IntArray  # (n + 1,) where each record starts, in numbers, and where the last one ends
    values: npt.NDArray[np.float16]  # of all records

    def read(self, number: int, channels: int) -> Float32Array:
        """Return a latent image (channels, rows, columns)."""
        values = self.values[self.starts[number] : self.starts[number + 1]].astype(np.float32)
        latent: Float32Array = values.reshape(channels, *self.sizes[number])
        return latent


def image_key(media: Media) -> bytes:
    """Return the hash of an image's bytes. Raises BadImageError."""
    return hashlib.blake2b(read_image_bytes(media), digest_size=_KEY_BYTES).digest()


class LatentReader:
    """Latents by the images that they were made of. Files are opened at the first read, once in a process."""

    def __init__(self, folder: Path, expected: LatentHeader) -> None:
        """Read from a folder whose latents must be `expected`."""
        self._folder, self._expected = folder, expected

    def read(self, media: Media) -> Float32Array | None:
        """Return the latent image (channels, rows, columns) of an image; None if it has none.

        Raises BadImageError for an image that cannot be read, DataError for a folder that cannot be used.
        """
        records = _open_records(self._folder, self._expected)
        number = records.numbers.get(image_key(media))
        return None if number is None else records.read(number, self._expected.channels)

    def missing(self, media: Media) -> DataError:
        """Return the error for an image without a latent."""
        return DataError(
            f"{media}: {self._folder} has no latent of this image (model.generator.latents); run `{COMMAND}` on this "
            "recipe again, which adds those that are missing"
        )


@lru_cache(maxsize=2)  # of training and validation; every step has a reader of its own
def _open_records(folder: Path, expected: LatentHeader) -> _Records:
    """Open the records of a folder, which must be of the expected kind."""
    check_header(folder, expected)
    numbers = read_keys(folder)
    sizes = _read_sizes(folder, expected, len(numbers))
    starts = np.concatenate([[0], np.cumsum(expected.channels * sizes.prod(axis=1))]).astype(np.int64)
    if not numbers:
        return _Records(numbers, sizes, starts, np.empty(0, dtype=_DTYPE))
    path = folder / _RECORDS_FILE
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; run `{COMMAND}` again") from None
    needed = int(starts[-1]) * _DTYPE.itemsize
    if num_bytes < needed:
        raise DataError(f"{path} has {num_bytes} bytes, but {len(numbers)} latents take {needed}; copy it again")
    return _Records(numbers, sizes, starts, np.memmap(path, dtype=_DTYPE, mode="r", shape=(int(starts[-1]),)))


def _read_sizes(folder: Path, header: LatentHeader, num_records: int) -> IntArray:
    """Return rows and columns of the first records, (n, 2)."""
    if not header.bucket_step:
        return np.full((num_records, 2), header.side, dtype=np.int64)
    path = folder / _SIZES_FILE
    try:
        content = path.read_bytes()[: num_records * 2 * _SIZE_DTYPE.itemsize]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; run `{COMMAND}` again") from None
    if len(content) < num_records * 2 * _SIZE_DTYPE.itemsize:
        raise DataError(f"{path} has {len(content)} bytes, too few for {num_records} latents; copy it again")
    return np.frombuffer(content, dtype=_SIZE_DTYPE).reshape(-1, 2).astype(np.int64)


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
            sizes = _read_sizes(folder, header, len(self.keys)) if self.keys else np.empty((0, 2), dtype=np.int64)
            num_values = int(header.channels * sizes.prod(axis=1).sum())
            self._records = (folder / _RECORDS_FILE).open("ab")
            self._keys = (folder / _KEYS_FILE).open("ab")
            self._sizes = (folder / _SIZES_FILE).open("ab") if header.bucket_step else None
            self._records.truncate(num_values * _DTYPE.itemsize)
            self._keys.truncate(len(self.keys) * _KEY_BYTES)
            if self._sizes is not None:
                self._sizes.truncate(len(self.keys) * 2 * _SIZE_DTYPE.itemsize)
        self._folder = folder

    def add(self, keys: Sequence[bytes], latents: Float32Array) -> None:
        """Add latents (n, channels, rows, columns) of images with these keys. Raises UserError."""
        with writing("model.generator.latents", self._folder, "latents"):
            self._records.write(latents.astype(_DTYPE).tobytes())
            self._records.flush()
            sync_file(self._records.fileno())
            if self._sizes is not None:
                self._sizes.write(np.array([latents.shape[2:]] * len(keys), dtype=_SIZE_DTYPE).tobytes())
                self._sizes.flush()
                sync_file(self._sizes.fileno())
            self._keys.write(b"".join(keys))
            self._keys.flush()
        self.keys.update(keys)

    def __enter__(self) -> "LatentWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._records, self._sizes, self._keys):
            if file is not None:
                file.close()


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
