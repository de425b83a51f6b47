"""What a model that started from no folder is, for families that write the JSON files of one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

JsonFiles = Mapping[str, Mapping[str, Any]]  # content by name of the file


@dataclass(frozen=True)
class NewModel:
    """A model by its settings, and what else its config states."""

    units: Mapping[str, Mapping[str, Any]]  # settings by name of the unit, as in a recipe with none left out
    image: Mapping[str, Any]  # settings of `data.image`
    feature_tokens: Mapping[str, int]  # by modality: the token whose place a feature takes, of an image or a clip
    video_token: int | None  # likewise of a video; that of images where the tokenizer has no other
    end_ids: tuple[int, ...]  # tokens at which generation ends
    max_tokens: int  # of a sequence


@dataclass(frozen=True)
class FolderWriter:
    """How a family writes the JSON files of a new folder.

    It need not check that the model is one of the family: what its files say is read back and compared.
    """

    units: frozenset[str]  # that its models have
    files: Callable[[NewModel], JsonFiles]
