"""`mmtrain data serve`."""

from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


def serve(
    recipe: RecipeFile,
    overrides: Overrides,
    bind: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; tcp://0.0.0.0:5557 is every network interface.")
    ] = "tcp://127.0.0.1:5557",
    workers: Annotated[
        int | None, typer.Option(min=1, max=256, metavar="N", help="Worker processes. Default: one for each core.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prepare steps for trainers on other machines.

    Trainers name this address in `data.producers`. Anybody who reaches it can read the data: listen on a network of
    your own. SIGTERM and Ctrl-C end it; trainers then take its steps elsewhere.
    """
    import json
    import sys
    from functools import partial

    from mmtrain.data.loading.worker_pool import num_available_cores
    from mmtrain.data.service.protocol import require_zmq
    from mmtrain.recipe import load_recipe, require_runnable

    made = load_recipe(recipe, overrides).recipe
    require_runnable(made, "data serve")
    require_zmq("mmtrain data serve")
    from mmtrain.data.service.producer import open_producer
    from mmtrain.runtime.resilience.signals import SignalPipe

    number = workers or num_available_cores()
    with SignalPipe() as signals:
        producer = open_producer(made, bind, number, partial(print, "mmtrain:", file=sys.stderr, flush=True))
        in_words = f"{number} workers prepare steps of {made.name} at {producer.address}"
        found = {"recipe": made.name, "address": producer.address, "workers": number}
        print(json.dumps(found) if as_json else in_words, flush=True)
        producer.serve(signals.reader)
