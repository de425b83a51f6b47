"""Write a run's model as a folder that other programs open, for `mmtrain export` and `mmtrain.export`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from mmtrain.errors import UserError
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.source_path import RemotePath, parse_source_path, require_object_store
from mmtrain.recipe.settings.train_settings import ExportedPart

if TYPE_CHECKING:
    from mmtrain.checkpoint import ChosenCheckpoint
    from mmtrain.weights import ExportDtype, ExportedFolder

ExportFormat = Literal["hf", "dcp"]


def export_run(
    run: Path,
    out: Path | RemotePath,
    checkpoint: "ChosenCheckpoint" = "newest",
    dtype: "ExportDtype | None" = None,
    part: ExportedPart = "model",
    warn: Callable[[str], None] = print,
    format: ExportFormat = "hf",
) -> "tuple[ExportedFolder, list[str]]":
    """Write a checkpoint of a run as a folder of transformers, peft or diffusers, with a card (`README.md`).

    Return what was written, and lines that say what opens it.

    Args:
        run: folder of the run.
        out: folder to write, which must not exist; or a place in an object store, to which the folder is uploaded
            from a draft in the run's folder.
        checkpoint: the newest good one, the best one by `train.best`, or that of a step.
        dtype: of the stored weights; by default as in the folder that the run started from, else fp32.
        part: the model without a generator, the adapters of `train.lora` alone, or the image generator alone.
        warn: hears of checkpoints that are damaged.
        format: `hf`; or `dcp`: weights and optimizer as the checkpoint holds them, for torch.distributed.checkpoint.
            Then `dtype` and `part` stay as they are, and there is no card.

    Raises:
        UserError: `run` is no run, `out` exists, or the model has no such part.
        CheckpointError: no checkpoint is good, none is of that step, or none is known to be the best.
        RemoteReadError: the object store does not take it.
    """
    if isinstance(out, RemotePath):
        return _export_to_store(
            out, run, partial(export_run, run, checkpoint=checkpoint, dtype=dtype, part=part, warn=warn, format=format)
        )
    from mmtrain.runtime.run_folder import load_run_recipe
    from mmtrain.runtime.training.export_checkpoint import export_checkpoint

    recipe = load_run_recipe(run)
    if format == "dcp":
        return _export_dcp(run, recipe, checkpoint, out, warn)
    written = export_checkpoint(run, checkpoint, out, dtype, part, warn)
    if part == "generator":
        return written, _generator_commands(out, recipe)
    if part == "adapter":
        return written, _adapter_commands(out, recipe.model.hf)
    return written, _model_commands(out, recipe)


def output_place(out: str | Path) -> Path | RemotePath:
    """Return the folder or the place in an object store that a text names. Raises UserError for other URLs."""
    try:
        place = parse_source_path(out if isinstance(out, Path) else str(out))
        if isinstance(place, RemotePath):
            require_object_store("it", place)
    except ValueError as error:
        raise UserError(f"--out: {error}") from None
    return place


def _export_to_store(
    out: RemotePath, run: Path, export: "Callable[[Path], tuple[ExportedFolder, list[str]]]"
) -> "tuple[ExportedFolder, list[str]]":
    """Write a folder to the disk of the run, and upload it; what is wrong with the store is said before."""
    from mmtrain.data.remote.folder_upload import upload_folder
    from mmtrain.data.remote.object_store import ObjectStore
    from mmtrain.runtime.run_folder import load_run_recipe

    load_run_recipe(run)
    store = ObjectStore.at(out.url)
    if store.sizes():
        raise UserError(f"--out {out}: exists already; name a place where nothing is")
    store.require_writable()
    with TemporaryDirectory(prefix=".export-", dir=run) as temporary:
        folder = Path(temporary) / out.name
        written, _ = export(folder)
        upload_folder(store, folder)
    return replace(written, folder=out), []


def _export_dcp(
    run: Path, recipe: Recipe, checkpoint: "ChosenCheckpoint", out: Path, warn: Callable[[str], None]
) -> "tuple[ExportedFolder, list[str]]":
    from mmtrain.checkpoint import open_chosen
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER
    from mmtrain.weights import export_dcp

    written = export_dcp(recipe, open_chosen(run / CHECKPOINTS_FOLDER, checkpoint, warn), out)
    path = quote(str(out))
    return written, [f"  mmtrain train RECIPE --set train.init_from={path} --set train.init_optimizer=true"]


def _model_commands(folder: Path, recipe: "Recipe") -> list[str]:
    """Return the commands that serve an exported model, and the one that scores a model that sees."""
    from mmtrain.recipe.settings.modalities import VISION

    path = quote(str(folder))
    commands = [f"  vllm serve {path}", f"  python -m sglang.launch_server --model-path {path}"]
    if any(encoder.modality == VISION.name for encoder in recipe.model.all_encoders.values()):
        commands.append(f"  python -m lmms_eval --model vllm --model_args model={path} --tasks mmmu_val")
    if recipe.model.generator is not None:
        commands.append("  the image generator is not in it: --generator writes it to a folder of its own")
    return commands


def _adapter_commands(folder: Path, base: Path | None) -> list[str]:
    """Return the command that serves the model in `base` with an exported adapter."""
    return [f"  vllm serve {quote(str(base))} --enable-lora --lora-modules adapter={quote(str(folder))}"]


def _generator_commands(folder: Path, recipe: "Recipe") -> list[str]:
    """Return the line of Python that opens an exported generator."""
    from mmtrain.families.generators import generator_config

    assert recipe.model.generator is not None
    model_class = generator_config(recipe.model.generator.model_dump())["_class_name"]
    return [f"  diffusers.{model_class}.from_pretrained({str(folder)!r})"]
