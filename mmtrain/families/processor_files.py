"""Find the config of one processor among the files of a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmtrain.errors import ModelFolderError
from mmtrain.families.folder_files import IMAGE_PROCESSOR_FILE, PROCESSOR_FILE

# The second one holds the processors of all media of a model, each under a key of its own.
_FILES = (IMAGE_PROCESSOR_FILE, PROCESSOR_FILE)


def read_processor(folder: Path, key: str, type_key: str) -> tuple[Path, Mapping[str, Any]] | None:
    """Return a processor's config and its file; None if no file has one.

    key: where the processor is in files of several. type_key: what tells its config from those of other media.

    Raises ModelFolderError for a file that cannot be read.
    """
    for name in _FILES:
        path = folder / name
        try:
            config = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelFolderError(f"cannot read {path}: {error}") from None
        inner = config.get(key, config) if isinstance(config, dict) else None
        if isinstance(inner, dict) and type_key in inner:
            return path, inner
    return None
