"""Buckets of layers: whose gradients replicas reduce together, and whose parameters they gather together.

A bucket's reduction runs beside the backward of the layers before it, so that small buckets leave less to wait for
behind the last one. Each is a collective of its own, and small collectives waste the links. The smallest size is that
of Megatron-LM's distributed optimizer.
"""

from collections.abc import Sequence
from itertools import zip_longest

from mmtrain.costs.layer_arithmetic import num_apart_parameters, num_trained_parameters
from mmtrain.models.shapes.layer_shape import LayerShape
from mmtrain.models.shapes.model_shape import ModelShape

MIN_BUCKET_PARAMETERS = 40_000_000
MIN_PARAMETERS_PER_REPLICA = 1_000_000  # so that the pieces of a ring of many replicas stay large


def least_parameters(num_replicas: int) -> int:
    """Return the fewest parameters of a bucket that suit so many replicas."""
    return max(MIN_BUCKET_PARAMETERS, MIN_PARAMETERS_PER_REPLICA * num_replicas)


def bucket_starts(
    trained: Sequence[int],
    num_replicas: int,
    min_parameters: int | None = None,
    apart: Sequence[int] = (),
    ep: int = 1,
) -> tuple[int, ...]:
    """Return the layers of a model chunk with which its buckets start, the first one's is 0.

    From the last layer on, whose backward ends first, a bucket takes layers until it is large enough. What is left at
    the first layers is a bucket, too, unless nothing in it trains.

        >>> bucket_starts([0, 3, 2, 4, 4, 1], num_replicas=2, min_parameters=5)
        (0, 2, 4)

    Args:
        trained: of each layer, the parameters that train on one rank.
        num_replicas: which reduce gradients together.
        min_parameters: the fewest of a bucket; None: what suits the number of replicas.
        apart: of each layer, those of `trained` that every `ep`-th replica reduces alone. As fewer of them suit fewer
            replicas, each counts for more.
        ep: replicas that hold different experts.
    """
    smallest = min_parameters or least_parameters(num_replicas)
    added_weight = 0.0 if min_parameters else smallest / least_parameters(num_replicas // ep) - 1
    sizes = [count + added_weight * of_experts for count, of_experts in zip_longest(trained, apart, fillvalue=0)]
    starts: list[int] = []
    num_in_bucket = 0.0
    for layer in range(len(trained) - 1, -1, -1):
        num_in_bucket += sizes[layer]
        if num_in_bucket >= smallest and any(trained[:layer]):
            starts.append(layer)
            num_in_bucket = 0.0
    return (0, *reversed(starts))


def reduced_parameters(shape: ModelShape, unit: str, tp: int, pp: int) -> list[int]:
    """Return how many parameters of each layer of a unit one rank trains, and so reduces the gradients of.

    Where one rank holds both ends of the LLM, a tied matrix counts to the embedding alone.
    """
    layers = shape.unit(unit).layers
    counts: dict[LayerShape, int] = {layer: num_trained_parameters(layer, tp) for layer in dict.fromkeys(layers)}
    trained = [counts[layer] for layer in layers]
    if shape.tied_embeddings and pp == 1 and shape.unit(unit).kind == "llm":
        matrix = layers[-1].vocab * layers[-1].hidden // tp
        trained[-1] -= matrix if trained[-1] >= matrix else 0
    return trained


def apart_parameters(shape: ModelShape, unit: str, tp: int) -> list[int]:
    """Return how many of `reduced_parameters` belong to experts of which replicas hold different ones."""
    layers = shape.unit(unit).layers
    counts = {layer: num_apart_parameters(layer, tp) for layer in dict.fromkeys(layers)}
    return [counts[layer] for layer in layers]
