"""What the process may use that reads the sources of a recipe."""

from collections.abc import Sequence

from mmtrain.limited_reads import Bounds
from mmtrain.recipe.settings.data_settings import FORMATS, LimitSettings, SourceSettings
from mmtrain.recipe.settings.source_path import RemotePath


def reading_bounds(limits: LimitSettings, sources: Sequence[SourceSettings]) -> Bounds:
    """Return the bounds of reading sources: the network is for remote ones, and for formats of plug-ins."""
    return Bounds(limits.max_reading_bytes, any(_needs_network(source) for source in sources))


def _needs_network(source: SourceSettings) -> bool:
    is_plugin = source.format is not None and source.format not in FORMATS
    return is_plugin or isinstance(source.path, RemotePath) or isinstance(source.image_root, RemotePath)
