"""Cut samples that are too long (`data.too_long: cut`): the first tokens of a sample are kept, and whole media only.

A cut sample is encoded as a whole and then cut, since its first turns may read otherwise without the later ones.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np

from mmtrain.balance.batch_meta import IntArray
from mmtrain.data.formats.sample import Sample, SampleCut
from mmtrain.data.text.sample_tokenizer import (
    IGNORE_INDEX,
    EncodedSample,
    MediaFeatures,
    MediumFeatures,
    SampleTokenizer,
    TimedItems,
    total_features,
)
from mmtrain.recipe.settings.modalities import GENERATOR

MAX_CUT_CHARACTERS = 1 << 20  # of a sample that is cut: every step that holds it encodes all of its text


def encode_kept(tokenizer: SampleTokenizer, sample: Sample, features: MediaFeatures) -> EncodedSample:
    """Encode a sample, up to its cut if it has one. `features`: of all its media, also of those behind the cut."""
    encoded = tokenizer.encode(sample, features)
    return encoded if sample.cut is None else cut_encoded(encoded, sample.cut.tokens)


def cut_encoded(encoded: EncodedSample, num_tokens: int) -> EncodedSample:
    """Return the first tokens of a sample. The last one predicts nothing: what follows it is left out.

    No end of an answer is added, so that none is learned where the data have none.
    """
    labels = encoded.labels[:num_tokens].copy()
    labels[-1:] = IGNORE_INDEX
    return EncodedSample(encoded.ids[:num_tokens], labels)


def find_cut(
    ids: IntArray, item_ids: Mapping[str, Sequence[int]], features: MediaFeatures, max_tokens: int
) -> tuple[int, dict[str, int]]:
    """Return how many of `ids` to keep, at most `max_tokens`, and how many media of each modality are whole then.

    item_ids: modality -> the tokens whose places its features take. A cut inside of a medium moves in front of it.
    """
    spans = {modality: _spans(ids, item_ids[modality], media) for modality, media in features.items()}
    end = max_tokens
    while inside := [start for of_modality in spans.values() for start, stop in of_modality if start < end < stop]:
        end = min(inside)  # media of two modalities may alternate
    return end, {modality: sum(stop <= end for _, stop in of_modality) for modality, of_modality in spans.items()}


def _spans(ids: IntArray, tokens: Sequence[int], media: Sequence[MediumFeatures]) -> list[tuple[int, int]]:
    """Return where the first feature of each medium is, and the position behind its last one."""
    positions = np.flatnonzero(np.isin(ids, tokens)).tolist()
    spans = []
    first = 0
    for medium in media:
        last = first + total_features(medium)
        spans.append((positions[first], positions[last - 1] + 1))
        first = last
    assert first == len(positions), "every feature has a token"
    return spans


def tokens_of_items(tokenizer: SampleTokenizer) -> dict[str, Sequence[int]]:
    """Return for each modality, and for images to draw, the tokens whose places features take."""
    queries = {} if tokenizer.query_id is None else {GENERATOR: (tokenizer.query_id,)}
    return {**tokenizer.item_ids, **queries}


def make_cut(num_tokens: int, features: MediaFeatures) -> SampleCut:
    """Return the cut of a sample, which holds the features of all its media."""
    return SampleCut(
        num_tokens, json.dumps({modality: [_plain(m) for m in media] for modality, media in features.items()})
    )


def features_of_cut(cut: SampleCut) -> MediaFeatures:
    """Return the features of all media of a sample that is cut."""
    return {modality: [_features(value) for value in media] for modality, media in json.loads(cut.features).items()}


def _plain(medium: MediumFeatures) -> object:
    if isinstance(medium, TimedItems):
        return {"features": medium.features, "tenths": medium.tenths}
    return medium


def _features(value: object) -> MediumFeatures:
    if isinstance(value, dict):
        return TimedItems(tuple(value["features"]), tuple(value["tenths"]))
    if isinstance(value, list):
        return tuple(value)
    assert isinstance(value, int), "what `_plain` returns"
    return value
