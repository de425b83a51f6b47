"""`mmtrain export`."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmtrain.cli.options import CheckpointChoice, RunFolder, chosen_checkpoint

if TYPE_CHECKING:
    from mmtrain.recipe.settings.train_settings import ExportedPart


class FolderFormat(StrEnum):
    """The values of `--format`."""

    HF = "hf"
    DCP = "dcp"


class StoredType(StrEnum):
    """The values of `--dtype`."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


def export(
    run: RunFolder,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder to write, or a place like s3://bucket/model; it must not exist."),
    ],
    checkpoint: CheckpointChoice = "newest",
    dtype: Annotated[
        StoredType | None,
        typer.Option(
            help="Type of the stored weights. Default: as in the folder that the run started from, else fp32."
        ),
    ] = None,
    format: Annotated[
        FolderFormat,
        typer.Option(
            help="`hf`: a Hugging Face folder. `dcp`: weights and optimizer for torch.distributed.checkpoint, as the "
            "checkpoint holds them, under Hugging Face names."
        ),
    ] = FolderFormat.HF,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapters of `train.lora` alone, for peft. Default: merge them.")
    ] = False,
    generator: Annotated[
        bool, typer.Option("--generator", help="Write the image generator alone, as a folder of diffusers.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME",
            help="Publish the folder as this model of the Hugging Face hub, with its card. Needs mmtrain[hf].",
            show_default=False,
        ),
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="Let everyone see a repository that --push creates. Default: private.")
    ] = False,
) -> None:
    """Write a trained model for Hugging Face or torch DCP.

    transformers, vLLM and SGLang open it. Config, tokenizer and templates are those of the folder that the run started
    from (`model.hf`). A run from random weights gets those of a family that has its settings. An image generator is
    left out, unless --generator asks for it alone. A card, README.md, states base model, data, results, plan, recipe.
    """
    from mmtrain.api.exported_run import export_run, output_place
    from mmtrain.api.hub_upload import create_repository, push_folder

    if public and push is None:
        raise typer.BadParameter("--public is of a repository that --push creates; give both")
    if adapter and generator:
        raise typer.BadParameter("--adapter and --generator write different folders; give one of them")
    given = {"--dtype": dtype is not None, "--adapter": adapter, "--generator": generator, "--push": push is not None}
    excluded = [option for option, is_given in given.items() if is_given]
    if format is FolderFormat.DCP and excluded:
        raise typer.BadParameter(f"--format dcp writes what the checkpoint holds; leave {' and '.join(excluded)} out")
    place = output_place(out)
    if push is not None:
        if not isinstance(place, Path):
            raise typer.BadParameter("--push publishes a folder of this machine; leave it out, or name one with --out")
        create_repository(push, public=public)
    part: ExportedPart = "adapter" if adapter else "generator" if generator else "model"
    written, commands = export_run(
        run, place, chosen_checkpoint(checkpoint), None if dtype is None else dtype.value, part, _warn, format.value
    )
    typer.echo("\n".join([*written.notes, written.summary(), *commands]))
    if push is not None and isinstance(place, Path):
        typer.echo(f"published: {push_folder(place, push, f'Weights after step {written.step}')}")


def _warn(text: str) -> None:
    typer.echo(f"mmtrain: {text}", err=True)
