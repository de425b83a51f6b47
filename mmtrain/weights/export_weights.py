"""Write a run's weights as a Hugging Face folder, tensor by tensor.

It is the folder that the run started from with other values, or a new one for a run that started from random weights.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mmtrain.checkpoint import Checkpoint, LocalStorage
from mmtrain.checkpoint.tensorfile import TensorEntry, header_bytes, tensor_bytes
from mmtrain.errors import ModelFolderError, UserError, writing
from mmtrain.families import CONFIG_FILE, ModelFolder, ParameterSource, read_model_folder
from mmtrain.families.folder_files import CONVERSATION_FILES, INDEX_FILE, SINGLE_FILE, SLOW_TOKENIZER_FILES
from mmtrain.families.hub_models import fetch_weights
from mmtrain.models.layer_shape import LoraShape
from mmtrain.models.model_shape import build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import adapted_weights, adapter_names, merge_adapter, read_parameter
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors
from mmtrain.weights.match_tensors import MatchedFolder, match_tensors, respell
from mmtrain.weights.new_folder import describe_new_folder, write_new_files, write_tokenizer_files

if TYPE_CHECKING:
    import torch

ExportDtype = Literal["bf16", "fp16", "fp32"]
MAX_FILE_BYTES = 5_000_000_000  # as `save_pretrained` of transformers splits files
TORCH_NAMES: Mapping[ExportDtype, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_COPIED_FILES = (  # what belongs to the model; not its card and its data, which would be those of another model
    "*.jinja", "*.model", "*.tiktoken", "*tokenizer*.json", "LICENSE*", "NOTICE*", "added_tokens.json",
    "chat_template.json", "config.json", "generation_config.json", "merges.txt", "*processor_config.json",
    "special_tokens_map.json", "spk_dict.pt", "vocab.json", "vocab.txt",  # spk_dict: voices of Qwen2.5-Omni
)  # fmt: skip
# Of these, what belongs to a tokenizer. A run with a tokenizer of its own (data.tokenizer) leaves them out.
_TEXT_FILES = (*CONVERSATION_FILES, *SLOW_TOKENIZER_FILES, "*.jinja", "*.model", "*.tiktoken", "*tokenizer*.json")


@dataclass(frozen=True)
class ExportedFolder:
    """What was written."""

    folder: Path
    step: int
    num_files: int  # with weights
    num_bytes: int  # of weights
    dtypes: tuple[str, ...]  # torch's names


@dataclass(frozen=True)
class _Target:
    """A tensor to write: a part of one of our parameters, or one that the family has and we do not compute."""

    entry: TensorEntry
    source: ParameterSource | None


@dataclass(frozen=True)
class _Content:
    """What to write into a folder."""

    targets: list[_Target]
    stored: FolderTensors | None  # the tensors of the folder that the run started from
    write_small_files: Callable[[Path], None]  # config, tokenizer and templates, into a folder


def export_folder(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path,
    dtype: ExportDtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportedFolder:
    """Write the weights of a checkpoint, in whatever sharding, to a new folder that `transformers` opens.

    Adapters are merged into their weights: W + (alpha / rank) B A, computed in fp32. Names, order of dimensions and,
    without `dtype`, the type of every tensor are those of the folder that the run started from, whose config, tokenizer
    and other small files are copied. Matrices and config have the tokens that the run added, and a tokenizer that
    `data.tokenizer` names takes the place of the folder's. For a run with units that did not start from that folder
    they are those of the family to which its model belongs, and fp32. One parameter at a time is in memory. The folder
    appears by rename when it is complete.

    Raises UserError for a run that no family can hold, and for an `out` that exists or cannot be written;
    ModelFolderError for a source folder that changed; CheckpointError.
    """
    source = source_folder(recipe)
    content = _new_content(recipe, dtype) if source is None else _content_like(source, recipe, dtype)
    targets, stored = content.targets, content.stored
    require_new(out)
    files = _split(targets, max_file_bytes)
    reader = _WeightReader(stored, checkpoint, adapted_weights(build_model_shape(recipe)))
    try:
        with draft_folder(out, "model") as draft:
            for name, targets_of_file in files.items():
                _write_file(draft / name, targets_of_file, reader)
            _write_index(draft, files)
            content.write_small_files(draft)
    finally:
        if stored is not None:
            stored.close()
    num_bytes = sum(target.entry.num_bytes for target in targets)
    dtypes = tuple(sorted({target.entry.dtype for target in targets}))
    return ExportedFolder(out, checkpoint.step, len(files), num_bytes, dtypes)


def require_new(out: Path) -> None:
    """Raise UserError for a folder that exists."""
    if out.exists():
        raise UserError(f"--out {out}: exists already; name a folder that does not")


@contextmanager
def draft_folder(out: Path, what: str) -> Iterator[Path]:
    """Yield a folder to write into; it becomes `out` at the end, or vanishes if anything fails.

    Raises UserError, which calls the content `what`, if it cannot be written.
    """
    draft = out.with_name(f".{out.name}.{os.getpid()}.draft")
    with writing("--out", out, what):
        try:
            draft.mkdir(parents=True)
            yield draft
            draft.rename(out)
        finally:
            shutil.rmtree(draft, ignore_errors=True)


def _new_content(recipe: Recipe, dtype: ExportDtype | None) -> _Content:
    """Describe the folder of a run that started from random weights."""
    folder = describe_new_folder(recipe)
    torch_name = TORCH_NAMES[dtype or "fp32"]
    spelling = folder.family.spellings[0]
    targets = []
    for source in respell(folder.family.weights(folder.settings), spelling):
        for tensor, shape in source.tensor_shapes().items():
            targets.append(_Target(TensorEntry(tensor, torch_name, shape), source))
    for unused in respell(folder.settings.carried, spelling):
        for tensor, shape in unused.tensor_shapes().items():
            targets.append(_Target(TensorEntry(tensor, torch_name, shape), None))
    return _Content(targets, None, lambda draft: write_new_files(recipe, folder, draft, torch_name))


def _content_like(folder: ModelFolder, recipe: Recipe, dtype: ExportDtype | None) -> _Content:
    """Describe the folder that the run started from, with the tokens that the run added."""
    stored = FolderTensors.of(folder.path)
    targets = _targets(match_tensors(folder, stored), stored, recipe.model.llm.vocab, dtype)
    return _Content(targets, stored, lambda draft: _write_small_files(folder, recipe, draft, dtype))


def source_folder(recipe: Recipe) -> ModelFolder | None:
    """Return the folder that all units of the run started from; None if there is none.

    Raises ModelFolderError for a folder that cannot be read.
    """
    if recipe.model.hf is None:
        return None
    try:
        folder = read_model_folder(recipe.model.hf)
        fetch_weights(folder.path)  # the names and types of its tensors, and those that training does not compute
    except ModelFolderError as error:
        raise ModelFolderError(f"model.hf: {error}") from None
    has_other_units = any(unit.name not in folder.settings.model for unit in build_model_shape(recipe).units)
    return None if has_other_units else folder


def _targets(
    matched: MatchedFolder, stored: FolderTensors, num_tokens: int, dtype: ExportDtype | None
) -> list[_Target]:
    """Return all tensors to write, those of one parameter after another; those of other models as they are."""
    targets = []
    first_dtype = next(iter(stored.tensors.values())).dtype  # of what the source folder lacks
    sources = [source.with_tokens(num_tokens) for source in (*matched.sources.values(), *matched.fresh.values())]
    shapes = [(tensor, shape, source) for source in sources for tensor, shape in source.tensor_shapes().items()]
    carried = [(tensor, stored.tensors[tensor].shape, None) for tensor in matched.carried]
    for tensor, shape, source in (*shapes, *carried):
        stored_dtype = stored.tensors[tensor].dtype if tensor in stored.tensors else first_dtype
        torch_name = DTYPES[stored_dtype] if dtype is None else TORCH_NAMES[dtype]
        targets.append(_Target(TensorEntry(tensor, torch_name, shape), source))
    for tensor in matched.of_other_models:
        unchanged = stored.tensors[tensor]
        targets.append(_Target(TensorEntry(tensor, DTYPES[unchanged.dtype], unchanged.shape), None))
    return targets


def _split(targets: Sequence[_Target], max_file_bytes: int) -> dict[str, list[_Target]]:
    """Divide the tensors over files, named as `transformers` does; a larger tensor has a file of its own."""
    groups: list[list[_Target]] = [[]]
    num_bytes = 0
    for target in targets:
        if groups[-1] and num_bytes + target.entry.num_bytes > max_file_bytes:
            groups.append([])
            num_bytes = 0
        groups[-1].append(target)
        num_bytes += target.entry.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


class _WeightReader:
    """Reads tensors to write; the parameter that several of them are made of is read once."""

    def __init__(self, stored: FolderTensors | None, checkpoint: Checkpoint, adapted: Mapping[str, LoraShape]) -> None:
        self._stored, self._checkpoint, self._adapted = stored, checkpoint, adapted
        self._parameter: tuple[str, torch.Tensor] | None = None

    def read(self, target: _Target) -> "torch.Tensor":
        """Return the values of a tensor, in the dtype in which the checkpoint or the source folder holds them."""
        import torch

        name, shape, source = target.entry.name, target.entry.shape, target.source
        if source is None and self._stored is None:
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)  # norms without effect
        if source is None:
            assert self._stored is not None
            return self._stored.read(name, tuple((0, size) for size in shape))
        values = self._values_of(source)
        tensor = torch.empty(shape, dtype=values.dtype)
        for block in source.blocks:
            if block.tensor == name:
                place = tensor[tuple(slice(lo, hi) for lo, hi in block.tensor_box)]
                part = values[tuple(slice(lo, hi) for lo, hi in block.view_box)]
                place.copy_((part.T if block.is_transposed else part).reshape(place.shape))
        return tensor

    def _values_of(self, source: ParameterSource) -> "torch.Tensor":
        if self._parameter is None or self._parameter[0] != source.name:
            self._parameter = None  # free the last one before the next is read
            weight = read_parameter(self._checkpoint, source.name)
            source.check_cover(tuple(weight.shape))
            lora = self._adapted.get(source.name)
            if lora is not None:
                a, b = (read_parameter(self._checkpoint, name) for name in adapter_names(source.name))
                weight = merge_adapter(weight, a, b, lora.scale)
            self._parameter = (source.name, weight)
        return self._parameter[1]


def _write_file(path: Path, targets: Sequence[_Target], reader: _WeightReader) -> None:
    import torch

    def chunks() -> Iterator[bytes | memoryview]:
        yield header_bytes((target.entry for target in targets), metadata={"format": "pt"})
        for target in targets:
            yield tensor_bytes(reader.read(target).to(getattr(torch, target.entry.dtype)))

    LocalStorage().write(path, chunks())


def _write_index(draft: Path, files: Mapping[str, Sequence[_Target]]) -> None:
    """Write the index of several files; a single one needs none."""
    if len(files) == 1:
        return
    total_size = sum(target.entry.num_bytes for targets in files.values() for target in targets)
    num_parameters = sum(math.prod(target.entry.shape) for targets in files.values() for target in targets)
    weight_map = {target.entry.name: name for name, targets in files.items() for target in targets}
    index = {
        "metadata": {"total_parameters": num_parameters, "total_size": total_size},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (draft / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_small_files(folder: ModelFolder, recipe: Recipe, draft: Path, dtype: ExportDtype | None) -> None:
    """Copy config, tokenizer and templates; the config states another type of the weights, and more tokens."""
    tokenizer = recipe.data.tokenizer_path
    has_own_tokenizer = tokenizer != folder.path
    not_copied = _TEXT_FILES if has_own_tokenizer else ()
    for path in sorted(folder.path.iterdir()):
        is_wanted = any(fnmatch(path.name, pattern) for pattern in _COPIED_FILES)
        if path.is_file() and is_wanted and not any(fnmatch(path.name, pattern) for pattern in not_copied):
            shutil.copyfile(path, draft / path.name)
    if has_own_tokenizer:
        write_tokenizer_files(tokenizer, draft)
    config = folder.config_with_tokens(recipe.model.llm.vocab)
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config = {**config, key: TORCH_NAMES[dtype]}
    if config != folder.config:
        (draft / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
