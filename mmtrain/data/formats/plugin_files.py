"""Read files of formats that other packages know, as conversations in LLaVA's or OpenAI's layout."""

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, Protocol

from mmtrain.data.formats.bad_sample import BadSampleError
from mmtrain.data.formats.conversation import MediaResolver, build_sample, entry_id
from mmtrain.data.formats.layout_table import EntryFormat
from mmtrain.data.formats.sample import Quarantined, Sample
from mmtrain.data.remote.locations import open_location
from mmtrain.errors import DataError
from mmtrain.plugins import Plugin
from mmtrain.recipe.settings.source_path import SourcePath


class FormatReader(Protocol):
    """Reads one file of samples."""

    def __call__(self, file: BinaryIO, path: str) -> Iterator[Mapping[str, Any]]:
        """Yield each sample as an entry of LLaVA's or OpenAI's JSON, in an order that never changes.

        Paths of media in it start at the source's `image_root`, or else at the folder of the file.
        """
        ...


def read_with_plugin(
    plugin: Plugin, path: SourcePath, resolve_media: MediaResolver, entry_format: EntryFormat
) -> Iterator[Sample | Quarantined]:
    """Read every sample of a file in order.

    Raises PluginError where the plug-in fails, and `DataError` if the file cannot be read.
    """
    try:
        with open_location(str(path)) as file:
            with plugin.errors_named(f"reading {path}"):
                entries = iter(plugin.value(file, str(path)))
            index = 0
            while True:
                with plugin.errors_named(f"reading {path}, sample {index}"):
                    entry = entry_format.columns.rename(next(entries, None))
                if entry is None:
                    return
                try:
                    yield build_sample(entry, str(path), index, resolve_media, entry_format)
                except BadSampleError as bad:
                    yield Quarantined(str(path), index, entry_id(entry, str(index)), bad.kind, bad.reason)
                index += 1
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
