"""`mmtrain export`."""

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import RunFolder

if TYPE_CHECKING:
    from mmtrain.recipe import Recipe
    from mmtrain.weights import ExportDtype, ExportedFolder


class StoredType(StrEnum):
    """The values of `--dtype`."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")],
    step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Step of the checkpoint. Default: the newest good one.")
    ] = None,
    dtype: Annotated[
        StoredType | None,
        typer.Option(
            help="Type of the stored weights. Default: as in the folder that the run started from, else fp32."
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters of `train.lora` alone, for peft. Default: merge them.")
    ] = False,
    generator: Annotated[
        bool, typer.Option("--generator", help="Write the image generator alone, as a folder of diffusers.")
    ] = False,
) -> None:
    """Write a trained model as a Hugging Face folder.

    transformers, vLLM and SGLang open it. Config, tokenizer and templates are those of the folder that the run started
    from (`model.hf`). A run from random weights gets those of a family that has its settings. An image generator is
    left out, unless --generator asks for it alone.
    """
    from mmtrain.checkpoint import open_newest_good, open_step
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, load_run_recipe
    from mmtrain.weights import export_adapter, export_folder, export_generator

    if adapter and generator:
        raise typer.BadParameter("--adapter and --generator write different folders; give one of them")
    recipe = load_run_recipe(run)
    root = run / CHECKPOINTS_FOLDER
    checkpoint = open_newest_good(root, _warn) if step is None else open_step(root, step, _warn)
    stored_dtype: ExportDtype | None = None if dtype is None else dtype.value
    if generator:
        written = export_generator(recipe, checkpoint, out, stored_dtype)
        commands = _generator_commands(out, recipe)
    elif adapter:
        written = export_adapter(recipe, checkpoint, out, stored_dtype)
        commands = _adapter_commands(out, recipe.model.hf)
    else:
        written = export_folder(recipe, checkpoint, out, stored_dtype)
        commands = _model_commands(out, recipe)
        if recipe.model.generator is not None:
            commands.append("  the image generator is not in it: --generator writes it to a folder of its own")
    typer.echo("\n".join([*written.notes, _summary(written), *commands]))


def _warn(text: str) -> None:
    typer.echo(f"mmtrain: {text}", err=True)


def _summary(written: "ExportedFolder") -> str:
    files = "1 file" if written.num_files == 1 else f"{written.num_files} files"
    return (
        f"{written.folder}: weights after step {written.step}, {files}, {written.num_bytes / 1e9:,.3g} GB "
        f"({', '.join(written.dtypes)}). Use it with"
    )


def _model_commands(folder: Path, recipe: "Recipe") -> list[str]:
    """Return the commands that serve an exported model, and the one that scores a model that sees."""
    from mmtrain.recipe.settings.modalities import VISION

    path = quote(str(folder))
    commands = [f"  vllm serve {path}", f"  python -m sglang.launch_server --model-path {path}"]
    if any(encoder.modality == VISION.name for encoder in recipe.model.all_encoders.values()):
        commands.append(f"  python -m lmms_eval --model vllm --model_args model={path} --tasks mmmu_val")
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
