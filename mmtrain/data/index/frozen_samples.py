"""Find samples from which nothing learns, because all that they reach is frozen, and units that no sample reaches."""

from collections.abc import Iterator, Sequence

import numpy as np

from mmtrain.balance import SampleLengths
from mmtrain.balance.columns import block_slices
from mmtrain.data.formats.sample import PLURALS, Sample
from mmtrain.errors import DataError, RecipeError
from mmtrain.models.shapes.model_shape import ModelShape, build_model_shape
from mmtrain.recipe.settings.modalities import GENERATOR, MODALITIES
from mmtrain.recipe.settings.schema import Recipe

_TABLE = "table.weight"  # of an embedding, which also has queries


def warn_of_idle_training(recipe: Recipe, lengths: SampleLengths, samples: Sequence[Sample]) -> tuple[str, ...]:
    """Return warnings of samples that teach nothing, and of units that train and have no sample to learn from.

    Texts are such samples where encoders alone train, and captions without an image to draw where the generator does.

    Raises:
        RecipeError: every parameter is frozen.
        DataError: no sample teaches anything.
    """
    shape = build_model_shape(recipe)
    trained = [unit.name for unit in shape.units if any(layer.trainable for layer in unit.layers)]
    if not trained:
        raise RecipeError("train.freeze, model.UNIT.freeze: every parameter is frozen; let at least one train")
    return (*_warn_of_frozen_samples(recipe, shape, trained, lengths, samples), *_idle_units(recipe, trained, lengths))


def _warn_of_frozen_samples(
    recipe: Recipe, shape: ModelShape, trained: Sequence[str], lengths: SampleLengths, samples: Sequence[Sample]
) -> tuple[str, ...]:
    """Count the samples that reach nothing of what trains; return a warning if there are some."""
    if _llm_learns_from_text(shape):
        return ()
    num_frozen, first_frozen = 0, 0
    for rows in block_slices(len(lengths)):
        learns = np.zeros(rows.stop - rows.start, dtype=bool)
        for unit, items in lengths.items.items():
            if unit in trained or (unit == GENERATOR and "llm" in trained):  # of the LLM, the queries train
                learns |= np.diff(items.first[rows.start : rows.stop + 1]) > 0
        frozen = np.flatnonzero(~learns)
        if len(frozen) and not num_frozen:
            first_frozen = rows.start + int(frozen[0])
        num_frozen += len(frozen)
    if not num_frozen:
        return ()
    if recipe.model.generator is not None:
        why = "their answers hold no image to draw, and all else that they reach is frozen"
        remedy = "add images to draw to the answers, or let the LLM or an encoder train"
    else:
        media = " or ".join(_media(recipe, unit) for unit in trained)
        why = f"they have no {media} for what trains ({', '.join(trained)})"
        remedy = "add samples with such media, or let the LLM train (model.llm.freeze, train.freeze)"
    first = samples[first_frozen]
    text = (
        f"{num_frozen:,} of {len(lengths):,} samples teach nothing: {why}; the first: {first.source}, number "
        f"{first.index}, id {first.id!r}"
    )
    if num_frozen == len(lengths):
        raise DataError(f"{text}; {remedy}")
    return (text,)


def _idle_units(recipe: Recipe, trained: Sequence[str], lengths: SampleLengths) -> Iterator[str]:
    """Yield a warning for each unit that trains and gets nothing from any sample."""
    for unit, items in lengths.items.items():
        if unit in trained and not items.first[-1]:
            yield (
                f"{unit} trains, but no sample has {_media(recipe, unit)}: it takes time and memory, and learns "
                "nothing; check data.sources"
            )


def _media(recipe: Recipe, unit: str) -> str:
    """Name what a unit takes of samples."""
    if unit == GENERATOR:
        return "images to draw"
    return " or ".join(PLURALS[kind] for kind in MODALITIES[recipe.model.all_encoders[unit].modality].media)


def _llm_learns_from_text(shape: ModelShape) -> bool:
    """Return whether something of the LLM trains besides the queries, which samples without an image do not read."""
    embedding, *others = shape.unit("llm").layers
    table_trains = embedding.trainable and _TABLE not in embedding.frozen
    return table_trains or any(layer.trainable for layer in others)
