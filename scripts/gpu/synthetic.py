"""Steps of made-up samples: lengths as of pictures with questions, payload drawn at random, groups as in a run."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mmtrain.balance import Grouping, SampleLengths
from mmtrain.balance.batch_meta import ItemLengths
from mmtrain.data import GroupStream
from mmtrain.data.loading.batch_builder import StepData
from mmtrain.data.loading.payload import build_encoder_payload, build_text_payload
from mmtrain.data.media.images import Uint8Array
from mmtrain.data.text.sample_tokenizer import IGNORE_INDEX, EncodedSample
from mmtrain.planning.artifact.balancing_targets import derive_step_targets
from mmtrain.planning.artifact.plan import Plan
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import RankContext

NUM_SAMPLES = 512
IMAGE_ID = 3
FIRST_WORD_ID = 8
TARGET_SHARE = 1 / 8  # of a sample's tokens
SEED = 5


@dataclass(frozen=True)
class SampleSizes:
    """From what samples are drawn: sides of pictures in patches, and tokens of text, from and to."""

    sides: tuple[int, int]
    words: tuple[int, int]


SIZES = SampleSizes((52, 64), (192, 320))  # about 900 tokens of a picture and 256 of text
DRY_SIZES = SampleSizes((4, 10), (16, 32))


class SyntheticSamples:
    """Samples of one picture and a text each; or of a text alone, as long."""

    def __init__(self, recipe: Recipe, sizes: SampleSizes, with_images: bool = True) -> None:
        """Draw the lengths; nothing else is kept."""
        rng = np.random.default_rng(SEED)
        vision = recipe.model.all_encoders["vision"]
        merge = vision.merge
        low, high = sizes.sides
        sides = rng.integers(low // merge, high // merge + 1, (2, NUM_SAMPLES)) * merge
        num_words = rng.integers(*sizes.words, NUM_SAMPLES, endpoint=True)
        features = sides[0] * sides[1] // merge**2
        tokens = features + num_words
        items = ItemLengths(np.arange(NUM_SAMPLES + 1), sides[0], sides[1], sides[0] * sides[1], features)
        if not with_images:
            none = np.zeros(0, dtype=np.int64)
            items = ItemLengths(np.zeros(NUM_SAMPLES + 1, dtype=np.int64), none, none, none, none)
        targets = np.maximum(1, (tokens * TARGET_SHARE).astype(np.int64))
        self.lengths = SampleLengths(tokens, targets, {"vision": items})
        self._recipe = recipe
        self._cell_features = vision.cell_features
        self._num_features = features if with_images else np.zeros_like(features)
        # Drawn once: drawing every picture would take longer than the step.
        self._cells = rng.integers(0, 256, (high * high, self._cell_features), dtype=np.uint8)

    def steps(self, context: RankContext, plan: Plan, num_steps: int) -> Iterator[StepData]:
        """Yield what a rank needs of the first steps, grouped and arranged as for a run."""
        recipe = self._recipe
        stream = GroupStream(self.lengths, Grouping.of(recipe.data, recipe.train.num_groups), recipe.train.seed)
        targets = derive_step_targets(recipe, plan, self.lengths)
        for step in range(num_steps):
            meta = stream.batch(step, recipe.train.num_groups, context.dp, context.num_microbatches, targets)
            data = StepData(meta, {}, {}, ())
            for need in context.needs:
                for index in range(context.num_microbatches[need.unit]):
                    key = (need.replica, index)
                    if need.unit == "llm":
                        data.text[key] = build_text_payload(meta, need, index, {"vision": (IMAGE_ID,)}, self._encode)
                    else:
                        load = self._load_cells if need.media else None
                        payload = build_encoder_payload(meta, need.unit, *key, self._cell_features, load)
                        data.encoders.setdefault(need.unit, {})[key] = payload
            yield data

    def _encode(self, sample: int) -> EncodedSample:
        num_features = int(self._num_features[sample])
        num_tokens = int(self.lengths.tokens[sample])
        rng = np.random.default_rng([SEED, sample])
        ids = rng.integers(FIRST_WORD_ID, self._recipe.model.llm.vocab, num_tokens)
        ids[:num_features] = IMAGE_ID
        labels = np.full(num_tokens, IGNORE_INDEX, dtype=np.int64)
        num_targets = int(self.lengths.targets[sample])
        labels[-num_targets - 1 : -1] = ids[-num_targets:]
        return EncodedSample(ids, labels)

    def _load_cells(self, sample: int, position: int, rows: int, cols: int) -> Uint8Array:
        return self._cells[: rows * cols]
