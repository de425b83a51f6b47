"""`mmtrain data ...`."""

from pathlib import Path
from typing import Annotated

import typer

from mmtrain.cli import data_check, data_show, data_stats
from mmtrain.cli.options import AsJson, Overrides, RecipeFile
from mmtrain.extras import needing_packages

app = typer.Typer(help="Generate, check and inspect training data.", no_args_is_help=True, rich_markup_mode=None)

MAX_BAD_IMAGES_SHOWN = 10

app.command()(data_stats.stats)
app.command()(data_check.check)
app.command()(data_show.show)


@app.command("task-file")
def task_file(
    overrides: Overrides,
    recipe: RecipeFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write; it must not exist.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Score by this metric, too: contains, anls, f1, wer or 'regex=PATTERN'. Repeatable. "
            "Default: train.metrics of the recipe.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the held-out questions of a recipe as a task of lmms-eval.

    The folder holds its YAML, its functions and its data. Scores are those of `mmtrain evaluate`, whatever serves the
    model. Neither lmms-eval nor mmtrain is needed to write or to run it, respectively.
    """
    from mmtrain.api.lmms_task import write_lmms_task
    from mmtrain.recipe import load_recipe

    settings = load_recipe(recipe, overrides).recipe
    task, num_questions = write_lmms_task(settings, out, metric or settings.train.metrics)
    typer.echo(f"{out}: the task {task} with {num_questions} questions. Use it with")
    typer.echo(f"  python -m lmms_eval --include_path {out} --tasks {task} --model vllm --model_args model=FOLDER")


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output folder: images, training and held-out JSON, tokenizer.")
    ],
    samples: Annotated[int, typer.Option(min=1, help="Number of training samples.")] = 10000,
    heldout: Annotated[int, typer.Option(min=1, help="Number of held-out samples.")] = 400,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    drawing: Annotated[
        bool,
        typer.Option(
            "--drawing",
            help="Write captions of colored shapes to draw, and questions about such pictures, for models with an "
            "image generator.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate questions about drawn pictures, with answers.

    The pictures show colored shapes, digits and small charts. The samples are in LLaVA format, in a training and a
    held-out split, with a tokenizer trained on the training split.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.demo import generate_demo
    from mmtrain.data.synthetic.drawing_demo import generate_drawing_demo

    generate = generate_drawing_demo if drawing else generate_demo
    summary = generate(out, seed=seed, train=samples, heldout=heldout)
    sentence = (
        f"{out}: {summary.train} training and {summary.heldout} held-out samples, {summary.images} images, "
        f"a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)


@app.command()
@needing_packages("data digits")
def digits(
    source: Annotated[Path, typer.Option(metavar="DIR", help="Folder of recordings named DIGIT_SPEAKER_INDEX.wav.")],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Output folder: audio, training and held-out JSON, tokenizer.")
    ],
    sequences: Annotated[int, typer.Option(min=0, help="Number of extra training samples of two to four digits.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make question-answer samples from recordings of spoken digits.

    The samples are in LLaVA format, in a training and a held-out split with the same speakers, with a tokenizer
    trained on the training split.
    """
    import json
    from dataclasses import asdict

    from mmtrain.data.synthetic.digits import prepare_digits

    summary = prepare_digits(source, out, seed=seed, sequences=sequences)
    sentence = (
        f"{out}: {summary.recordings} recordings of {summary.speakers} speakers, {summary.train} training and "
        f"{summary.heldout} held-out samples, a tokenizer of {summary.vocab} tokens"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)


@app.command()
def group(
    recipe: RecipeFile,
    overrides: Overrides,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="LLM replicas that run side by side. Default: parallel.llm.dp, or a divisor of train.global_batch "
            "near 64.",
        ),
    ] = None,
    isf: Annotated[
        bool,
        typer.Option("--isf", help="Show ISF after each of its rounds, and with other thresholds of a full group."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the grouping methods on a recipe's samples.

    Groups one epoch by each method. The table shows the number of groups, samples per group, how full groups are, what
    padding would waste, and how long replicas would wait for each other.
    """
    import json
    import time
    from dataclasses import asdict

    from mmtrain.api.recipe_index import index_recipe
    from mmtrain.balance import Grouping
    from mmtrain.data.stream.count_groups import count_groups
    from mmtrain.data.stream.recipe_summaries import (
        compare_grouping_methods,
        score_isf_rounds,
        score_isf_thresholds,
    )
    from mmtrain.recipe import load_recipe
    from mmtrain.report.data_view import grouping_text, isf_text

    settings = load_recipe(recipe, overrides).recipe
    index = index_recipe(settings)
    settings = count_groups(settings, index.lengths)
    grouping = Grouping.of(settings.data, settings.train.num_groups)
    num_replicas = replicas or settings.parallel.llm.dp or grouping.row_size
    if isf:
        arguments = (index, grouping, settings.train.seed, num_replicas, time.perf_counter)
        rounds, thresholds = score_isf_rounds(*arguments), score_isf_thresholds(*arguments)
        if as_json:
            tables = {"rounds": [asdict(row) for row in rounds], "thresholds": [asdict(row) for row in thresholds]}
            typer.echo(json.dumps({"replicas": num_replicas, **tables}))
        else:
            typer.echo(isf_text(rounds, thresholds, num_replicas))
        return
    scores = compare_grouping_methods(index, grouping, settings.train.seed, num_replicas, time.perf_counter)
    if as_json:
        rows = [{**asdict(row), "chosen": row.method == grouping.method} for row in scores]
        typer.echo(json.dumps({"replicas": num_replicas, "methods": rows}))
    else:
        typer.echo(
            grouping_text(
                scores,
                grouping.method,
                num_replicas,
                lambda i: str(index.samples[i]) if index.samples else f"sample {i}",
            )
        )


@app.command()
@needing_packages("data latents")
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
    if settings.data.held_out_sources:
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


@app.command()
@needing_packages("data serve")
def serve(
    recipe: RecipeFile,
    overrides: Overrides,
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address to listen on; tcp://0.0.0.0:5557 is all network interfaces.")
    ] = "tcp://127.0.0.1:5557",
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="N", help="Number of worker processes. Default: one per core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare training steps for trainers on other machines.

    Trainers list this address in `data.producers`. To listen on more than the loopback interface, both need the same
    secret (`data.producer_secret`). SIGTERM, SIGHUP or Ctrl-C stops the producer; trainers then get its steps from
    another one.
    """
    import json
    import sys
    from functools import partial

    from mmtrain.machine_limits import num_available_cores
    from mmtrain.recipe import load_recipe, require_runnable

    settings = load_recipe(recipe, overrides).recipe
    require_runnable(settings, "data serve")
    from mmtrain.data.service.producer import open_producer
    from mmtrain.runtime.resilience.lost_output import ignore_lost_output
    from mmtrain.runtime.resilience.signals import SignalPipe

    ignore_lost_output()
    num_workers = workers or num_available_cores()
    with SignalPipe() as signals:
        producer = open_producer(settings, bind, num_workers, partial(print, "mmtrain:", file=sys.stderr, flush=True))
        description = {"recipe": settings.name, "address": producer.address, "workers": num_workers}
        sentence = f"{num_workers} workers prepare steps of {settings.name} at {producer.address}"
        print(json.dumps(description) if as_json else sentence, flush=True)
        producer.serve(signals.reader)


@app.command()
@needing_packages("data tiny-model")
def tiny_model(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help="A family of models, such as qwen2 or llama.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Output folder.")],
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed makes the same files.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Write a tiny random model of a family, to try recipes on one core.

    The folder is one that `model.hf` and transformers open: config, weights, a tokenizer with a chat template, and
    conversations to train on.
    """
    import json
    from dataclasses import asdict

    from mmtrain.weights.tiny_model import CONVERSATIONS_FOLDER, find_family_by_name, write_tiny_model

    summary = write_tiny_model(find_family_by_name(family), out, seed)
    sentence = (
        f"{out}: a tiny {summary.family} of {summary.parameters:,} parameters, a tokenizer of {summary.vocab} tokens, "
        f"{summary.train:,} conversations to train on and {summary.heldout} held out in {out / CONVERSATIONS_FOLDER}"
    )
    typer.echo(json.dumps(asdict(summary)) if as_json else sentence)
