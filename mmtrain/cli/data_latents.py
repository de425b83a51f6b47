"""`mmtrain data latents`."""

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile

MAX_BAD_IMAGES_SHOWN = 10


def latents(recipe: RecipeFile, overrides: Overrides, as_json: AsJson = False) -> None:
    """Encode the images that a recipe's generator draws, once, into model.generator.latents.

    Computes with the autoencoder of model.generator.vae, on a GPU if there is one. Images whose latents are there
    already are left alone, so a run that was stopped goes on, and new data is added.
    """
    import json
    import sys
    from dataclasses import asdict

    import torch

    from mmtrain.api.recipe_index import print_note
    from mmtrain.data import build_index
    from mmtrain.recipe import load_recipe
    from mmtrain.weights.encode_latents import encode_latents

    settings = load_recipe(recipe, overrides).recipe
    indices = [build_index(settings, notify=print_note)]
    if settings.data.validation:
        indices.append(build_index(settings, "validation", notify=print_note))
    total = sum(len(sample.target_images) for index in indices for sample in index.samples)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with typer.progressbar(length=total, label="encoding", file=sys.stderr) as bar:
        done = encode_latents(settings, indices, device, bar.update)
    if as_json:
        typer.echo(json.dumps({**asdict(done), "folder": str(done.folder)}))
        return
    lines = [f"{done.folder}: {done.added} latents added; {done.known} images had one, or were repeated"]
    if done.bad:
        lines.append(f"  {len(done.bad)} images cannot be decoded and were left out:")
        lines += [f"    {reason}" for reason in done.bad[:MAX_BAD_IMAGES_SHOWN]]
    typer.echo("\n".join(lines))
