"""Write a run's weights as a Hugging Face folder, tensor by tensor.

It is the folder that the run started from with other values, or a new one for a run that started from random weights.
An image generator becomes a folder of `diffusers`, a U-Net or a transformer, to put into a pipeline.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mmtrain.checkpoint import Checkpoint
from mmtrain.checkpoint.tensorfile import TensorEntry
from mmtrain.data.text.folder_templates import read_json, template_of_processor
from mmtrain.errors import ModelFolderError, UserError
from mmtrain.families import CONFIG_FILE, ModelFolder, read_model_folder
from mmtrain.families.family import Settings
from mmtrain.families.folder_files import (
    CONVERSATION_FILES,
    DIFFUSERS_INDEX_FILE,
    DIFFUSERS_SINGLE_FILE,
    INDEX_FILE,
    PROCESSOR_FILE,
    SINGLE_FILE,
    SLOW_TOKENIZER_FILES,
)
from mmtrain.families.generators import generator_config, generator_weights
from mmtrain.families.hub_models import fetch_weights
from mmtrain.families.trained_processors import write_trained_processors
from mmtrain.families.weight_layouts import respell
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.recipe import Recipe
from mmtrain.weights.adapters import adapted_weights
from mmtrain.weights.folder_tensors import DTYPES, FolderTensors
from mmtrain.weights.guest_weights import with_guest_weights
from mmtrain.weights.match_tensors import MatchedFolder, match_tensors
from mmtrain.weights.new_folder import (
    copy_further_templates,
    describe_new_folder,
    write_new_files,
    write_tokenizer_files,
)
from mmtrain.weights.write_tensors import (
    MAX_FILE_BYTES,
    TORCH_NAMES,
    ExportDtype,
    ExportedFolder,
    TensorTarget,
    WeightReader,
    draft_folder,
    require_new,
    split_targets,
    write_file,
    write_index,
)

_COPIED_FILES = (  # what belongs to the model; not its card and its data, which would be those of another model
    "*.jinja", "*.model", "*.tiktoken", "*tokenizer*.json", "LICENSE*", "NOTICE*", "added_tokens.json",
    "chat_template.json", "config.json", "generation_config.json", "merges.txt", "*processor_config.json",
    "special_tokens_map.json", "spk_dict.pt", "vocab.json", "vocab.txt",  # spk_dict: voices of Qwen2.5-Omni
)  # fmt: skip
# Of these, what belongs to a tokenizer. A run with a tokenizer of its own (data.tokenizer) leaves them out.
_TEXT_FILES = (*CONVERSATION_FILES, *SLOW_TOKENIZER_FILES, "*.jinja", "*.model", "*.tiktoken", "*tokenizer*.json")


@dataclass(frozen=True)
class FolderContent:
    """What to write into a folder."""

    targets: list[TensorTarget]
    stored: FolderTensors | None  # the tensors of the folder that the run started from
    write_small_files: Callable[[Path], tuple[str, ...]]  # config, tokenizer and templates; returns notes on them
    noun: str = "model"
    file_names: tuple[str, str] = (INDEX_FILE, SINGLE_FILE)
    further_files: Mapping[str, str] = field(default_factory=dict)


def export_folder(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path,
    dtype: ExportDtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    further_files: Mapping[str, str] | None = None,
) -> ExportedFolder:
    """Write the weights of a checkpoint, in whatever sharding, to a new folder that `transformers` opens.

    Adapters are merged into their weights: W + (alpha / rank) B A, computed in fp32. Names, order of dimensions and,
    without `dtype`, the type of every tensor are those of the folder that the run started from, whose config, tokenizer
    and other small files are copied. Matrices and config have the tokens that the run added, and a tokenizer that
    `data.tokenizer` names takes the place of the folder's. For a run with units that did not start from that folder
    they are those of the family to which its model belongs, and fp32. An image generator is left out:
    `export_generator` writes it. One parameter at a time is in memory. The folder, with the texts `further_files`,
    appears by rename when it is complete.

    Raises UserError for a run that no family can hold, and for an `out` that exists or cannot be written;
    ModelFolderError for a source folder that changed; CheckpointError.
    """
    content = describe_content(recipe, dtype)
    require_new(out)
    return _export(recipe, checkpoint, out, replace(content, further_files=further_files or {}), max_file_bytes)


def export_generator(
    recipe: Recipe,
    checkpoint: Checkpoint,
    out: Path,
    dtype: ExportDtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    further_files: Mapping[str, str] | None = None,
) -> ExportedFolder:
    """Write the generator of a checkpoint, in whatever sharding, to a new folder of `diffusers`; fp32 by default.

    The projector from the LLM's outputs to its context is no part of such a folder. One parameter at a time is in
    memory. The folder, with the texts `further_files`, appears by rename when it is complete.

    Raises UserError for a run without a generator, and for an `out` that exists or cannot be written; CheckpointError.
    """
    if recipe.model.generator is None:
        raise UserError("--generator: the run has no generator (model.generator); leave the option out")
    require_new(out)
    settings = recipe.model.generator.model_dump()
    torch_name = TORCH_NAMES[dtype or "fp32"]
    targets = list(TensorTarget.all_of(generator_weights(settings), lambda _: torch_name))

    def write_config(draft: Path) -> tuple[str, ...]:
        config = json.dumps(generator_config(settings), indent=2)
        (draft / CONFIG_FILE).write_text(f"{config}\n", encoding="utf-8")
        return ()

    names = (DIFFUSERS_INDEX_FILE, DIFFUSERS_SINGLE_FILE)
    content = FolderContent(targets, None, write_config, "generator", names, further_files or {})
    return _export(recipe, checkpoint, out, content, max_file_bytes)


def describe_content(recipe: Recipe, dtype: ExportDtype | None = None) -> FolderContent:
    """Describe the folder of a run: the one that it started from with other values, or a new one.

    Raises UserError for a run that no family can hold; ModelFolderError.
    """
    source = source_folder(recipe)
    return _new_content(recipe, dtype) if source is None else _content_like(source, recipe, dtype)


def _export(
    recipe: Recipe, checkpoint: Checkpoint, out: Path, content: FolderContent, max_file_bytes: int
) -> ExportedFolder:
    """Write a folder, which appears by rename when it is complete."""
    index_file, single_file = content.file_names
    files = split_targets(content.targets, max_file_bytes, single_file)
    reader = WeightReader(content.stored, checkpoint, adapted_weights(build_model_shape(recipe)))
    try:
        with draft_folder(out, content.noun, content.further_files) as draft:
            for name, targets_of_file in files.items():
                write_file(draft / name, targets_of_file, reader)
            write_index(draft, files, index_file)
            notes = content.write_small_files(draft)
    finally:
        if content.stored is not None:
            content.stored.close()
    num_bytes = sum(target.entry.num_bytes for target in content.targets)
    dtypes = tuple(sorted({target.entry.dtype for target in content.targets}))
    return ExportedFolder(out, checkpoint.step, len(files), num_bytes, dtypes, notes)


def _new_content(recipe: Recipe, dtype: ExportDtype | None) -> FolderContent:
    """Describe the folder of a run that started from random weights."""
    folder = describe_new_folder(recipe)
    torch_name = TORCH_NAMES[dtype or "fp32"]
    spelling = folder.family.spellings[0]
    computed, carried = folder.family.weights(folder.settings), folder.settings.carried
    targets = [
        *TensorTarget.all_of(respell(computed, spelling), lambda _: torch_name),
        *TensorTarget.all_of(respell(carried, spelling), lambda _: torch_name, unused=True),
    ]

    def write_small_files(draft: Path) -> tuple[str, ...]:
        return write_new_files(recipe, folder, draft, torch_name)

    return FolderContent(targets, None, write_small_files)


def _content_like(folder: ModelFolder, recipe: Recipe, dtype: ExportDtype | None) -> FolderContent:
    """Describe the folder that the run started from, with the tokens that the run added."""
    stored = FolderTensors.of(folder.path)
    targets = _targets(match_tensors(folder, stored), stored, recipe.model.llm.vocab, dtype)
    return FolderContent(targets, stored, lambda draft: _write_small_files(folder, recipe, draft, dtype))


def source_folder(recipe: Recipe) -> ModelFolder | None:
    """Return the folder that all units but a generator started from; None if there is none.

    Raises ModelFolderError for a folder that cannot be read.
    """
    if recipe.model.hf is None:
        return None
    try:
        folder = with_guest_weights(read_model_folder(recipe.model.hf, as_guest=recipe.model.guest))
        fetch_weights(folder.path)  # the names and types of its tensors, and those that training does not compute
    except ModelFolderError as error:
        raise ModelFolderError(f"model.hf: {error}") from None
    units = {unit.name for unit in build_model_shape(recipe).units} - {"generator"}
    return None if units - folder.settings.model.keys() else folder


def _targets(
    matched: MatchedFolder, stored: FolderTensors, num_tokens: int, dtype: ExportDtype | None
) -> list[TensorTarget]:
    """Return all tensors to write, those of one parameter after another; those of other models as they are."""
    first_dtype = next(iter(stored.tensors.values())).dtype  # of what the source folder lacks
    sources = [source.with_tokens(num_tokens) for source in (*matched.sources.values(), *matched.fresh.values())]

    def dtype_of(tensor: str) -> str:
        stored_dtype = stored.tensors[tensor].dtype if tensor in stored.tensors else first_dtype
        return DTYPES[stored_dtype] if dtype is None else TORCH_NAMES[dtype]

    targets = list(TensorTarget.all_of(sources, dtype_of))
    for tensor in matched.carried:
        targets.append(TensorTarget(TensorEntry(tensor, dtype_of(tensor), stored.tensors[tensor].shape)))
    for tensor in matched.of_other_models:
        unchanged = stored.tensors[tensor]
        targets.append(TensorTarget(TensorEntry(tensor, DTYPES[unchanged.dtype], unchanged.shape)))
    return targets


def _write_small_files(folder: ModelFolder, recipe: Recipe, draft: Path, dtype: ExportDtype | None) -> tuple[str, ...]:
    """Copy config, processors, tokenizer and templates, with what the run did otherwise; return lines on that.

    The config states another type of the weights, and more tokens; the processors what the recipe overrides.
    """
    tokenizer = recipe.data.tokenizer_path
    has_own_tokenizer = tokenizer != folder.path
    not_copied = _TEXT_FILES if has_own_tokenizer else ()
    for path in sorted(folder.path.iterdir()):
        is_wanted = any(fnmatch(path.name, pattern) for pattern in _COPIED_FILES)
        if path.is_file() and is_wanted and not any(fnmatch(path.name, pattern) for pattern in not_copied):
            shutil.copyfile(path, draft / path.name)
    if has_own_tokenizer:
        write_tokenizer_files(tokenizer, draft)
    else:
        copy_further_templates(folder.path, draft)
    config = folder.trained_config(recipe.model.llm.vocab)
    if dtype is not None:
        config = _with_dtype(config, TORCH_NAMES[dtype], folder.family.other_models)
    if config != folder.config:
        (draft / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    notes = write_trained_processors(folder, media_settings(recipe), draft)
    if has_own_tokenizer and template_of_processor(draft) is not None:  # it would go before that of the tokenizer
        processor = {key: value for key, value in read_json(draft / PROCESSOR_FILE).items() if key != "chat_template"}
        (draft / PROCESSOR_FILE).write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
    if folder.has_own_head:
        notes = ("tie_word_embeddings: false in config.json now, because the weights are not tied", *notes)
    return notes


def media_settings(recipe: Recipe) -> dict[str, Settings]:
    """Return the sections of `data` that say what media become, by name."""
    data = recipe.data
    return {"image": data.image.model_dump(), "video": data.video.model_dump(), "audio": data.audio.model_dump()}


def _with_dtype(config: Mapping[str, Any], torch_name: str, other_models: tuple[str, ...]) -> dict[str, Any]:
    """Return a config that states another type of the weights, in all sections but those of other models."""
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**_with_dtypes(config, torch_name, other_models), key: torch_name}


def _with_dtypes(config: Mapping[str, Any], torch_name: str, other_models: tuple[str, ...]) -> dict[str, Any]:
    changed = dict(config)
    of_others = tuple(prefix.removesuffix(".") for prefix in other_models)
    for key, value in config.items():
        if key in ("dtype", "torch_dtype"):
            changed[key] = torch_name
        elif isinstance(value, dict) and not key.startswith(of_others):
            changed[key] = _with_dtypes(value, torch_name, other_models)
    return changed
