"""Find samples of a model with a generator from which nothing learns, because all that they reach is frozen."""

from collections.abc import Sequence

import numpy as np

from mmtrain.balance import SampleLengths
from mmtrain.data.formats.sample import Sample
from mmtrain.errors import DataError
from mmtrain.models.model_shape import ModelShape, build_model_shape
from mmtrain.recipe.modalities import GENERATOR
from mmtrain.recipe.schema import Recipe

_TABLE = "table.weight"  # of an embedding, which also has queries


def warn_of_frozen_samples(recipe: Recipe, lengths: SampleLengths, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Count the samples from which nothing learns; return a warning if there are some, for models with a generator.

    Captions without an image to draw are such samples where the generator alone trains.

    Raises:
        DataError: all samples are.
    """
    if recipe.model.generator is None:
        return ()
    shape = build_model_shape(recipe)
    if _llm_learns_from_text(shape):
        return ()
    learns = np.zeros(len(lengths), dtype=bool)
    for unit, items in lengths.items.items():
        if unit == GENERATOR or any(layer.trainable for layer in shape.unit(unit).layers):
            learns |= np.diff(items.first) > 0
    frozen = np.flatnonzero(~learns)
    if not len(frozen):
        return ()
    first = samples[int(frozen[0])]
    text = (
        f"{len(frozen):,} of {len(lengths):,} samples teach nothing: their answers hold no image to draw, and all else "
        f"that they reach is frozen; the first: {first.source}, number {first.index}, id {first.id!r}"
    )
    if len(frozen) == len(lengths):
        raise DataError(f"{text}; add images to draw to the answers, or let the LLM or an encoder train")
    return (text,)


def _llm_learns_from_text(shape: ModelShape) -> bool:
    """Return whether something of the LLM trains besides the queries, which samples without an image do not read."""
    embedding, *others = shape.unit("llm").layers
    table_trains = embedding.trainable and _TABLE not in embedding.frozen
    return table_trains or any(layer.trainable for layer in others)
