"""`mmtrain data serve`."""

from typing import Annotated

import typer

from mmtrain.cli.options import AsJson, Overrides, RecipeFile


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

    from mmtrain.data.service.protocol import require_zmq
    from mmtrain.machine_limits import num_available_cores
    from mmtrain.recipe import load_recipe, require_runnable

    settings = load_recipe(recipe, overrides).recipe
    require_runnable(settings, "data serve")
    require_zmq("mmtrain data serve")
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
