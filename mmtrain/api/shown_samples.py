"""Samples as the model reads and learns them, from the data of a recipe: in a terminal, a notebook, or on a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mmtrain.errors import UserError, writing
from mmtrain.recipe import Recipe
from mmtrain.recipe.settings.audio_settings import AudioSettings
from mmtrain.recipe.settings.modalities import GENERATOR
from mmtrain.recipe.settings.vision_settings import VisionSettings
from mmtrain.report.shown_sample import Pixels, ShownMedium, ShownSample, ShownToken, TokenKind, shown_samples_json
from mmtrain.report.shown_sample_html import samples_page, samples_view
from mmtrain.report.shown_sample_text import samples_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmtrain.data.formats.sample import Quarantined
    from mmtrain.data.loading.prepared_samples import (
        PreparedItem,
        PreparedMedium,
        PreparedSample,
        PreparedSamples,
        PreparedToken,
    )
    from mmtrain.recipe.settings.data_settings import SourceSettings

MAX_PICTURES_PER_MEDIUM = 32  # a page stays within some megabytes
_SPECTROGRAM_WIDTH_PX = 1000  # of one line; longer clips continue below
# Dark to bright, each with what follows it evenly: as loudness is usually drawn.
_HEAT = np.array([[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]], dtype=np.float64)


@dataclass(frozen=True)
class ShownSamples:
    """Samples as the model reads and learns them. `print` shows them as text, a notebook with their pictures."""

    name: str
    samples: tuple[ShownSample, ...]

    def __str__(self) -> str:
        return samples_text(self.samples)

    def __repr__(self) -> str:
        return f"ShownSamples({self.name!r}, {len(self.samples)})"

    def _repr_html_(self) -> str:
        return samples_view(self.name, self.samples)

    def to_text(self, width: int, *, colors: bool) -> str:
        """Write them for a terminal of so many columns; with colors, with small pictures."""
        return samples_text(self.samples, width, colors=colors)

    def to_json(self) -> list[dict[str, object]]:
        """Return them as JSON has them, without pictures."""
        return shown_samples_json(self.samples)

    def save(self, path: str | Path) -> None:
        """Write one HTML page that needs no other file.

        Raises:
            UserError: the file cannot be written.
        """
        with writing("--out", Path(path), "page"):
            Path(path).write_text(samples_page(self.name, self.samples), encoding="utf-8")


def show_samples(recipe: Recipe, sources: Sequence["SourceSettings"], numbers: Sequence[int]) -> ShownSamples:
    """Show samples as training prepares them.

    Args:
        recipe: whose tokenizer, preprocessing and limits they get.
        sources: where they are.
        numbers: of the samples, from 0 through all sources.

    Raises:
        UserError: there are no sources, or fewer samples.
        DataError: a source cannot be read.
    """
    from mmtrain.data.loading.prepared_samples import prepare_samples

    if any(source.states_lengths for source in sources):
        raise UserError("data show: this recipe states lengths only, it has no samples to show; name a file of samples")
    prepared = prepare_samples(recipe, sources, numbers)
    if len(prepared.samples) < len(set(numbers)):
        files = ", ".join(str(source.path) for source in sources)
        last = prepared.num_looked_at - 1
        raise UserError(
            f"--sample {max(numbers)}: {files}: has {prepared.num_looked_at} samples; allowed: 0 to {last}"
            if prepared.num_looked_at
            else f"{files}: no samples; expected at least one"
        )
    return ShownSamples(recipe.name, _shown(prepared, recipe))


def _shown(prepared: "PreparedSamples", recipe: Recipe) -> tuple[ShownSample, ...]:
    from mmtrain.data.formats.sample import Quarantined

    samples = []
    for sample in prepared.samples:
        if isinstance(sample, Quarantined):
            samples.append(_unusable(sample))
        else:
            samples.append(_shown_sample(sample, recipe, prepared.warnings))
    return tuple(samples)


def _unusable(sample: "Quarantined") -> ShownSample:
    title = f"{sample.source}, number {sample.index}, id {sample.id!r}"
    return ShownSample(title, (), {}, problem=f"It cannot be used: {sample.kind}: {sample.reason}")


def _shown_sample(prepared: "PreparedSample", recipe: Recipe, warnings: Sequence[str]) -> ShownSample:
    sample = prepared.sample
    remarks = list(warnings)
    if prepared.is_held_out:
        remarks.append("data.validation_fraction holds it out: it is never trained on")
    if sample.cut is not None:
        remarks.append(f"data.too_long = cut: only its first {sample.cut.tokens:,} tokens train")
    counts = {"LLM tokens": prepared.num_tokens, "of them learned": prepared.num_learned}
    for medium in prepared.media:
        what = f"{medium.kind} tokens of {medium.unit}"
        counts[what] = counts.get(what, 0) + medium.llm_tokens
    return ShownSample(
        f"{sample.source}, number {sample.index}, id {sample.id!r}",
        tuple(remarks),
        counts,
        tuple(_shown_token(token) for token in prepared.tokens),
        tuple(_shown_medium(medium, recipe) for medium in prepared.media),
        None if prepared.broken is None else f"A medium becomes zeros: {prepared.broken}",
    )


def _shown_token(token: "PreparedToken") -> ShownToken:
    kind: TokenKind = "special" if token.spelled.is_special else "text"
    if token.unit is not None:
        return ShownToken(token.id, token.unit, "medium", token.is_learned)
    return ShownToken(token.id, token.spelled.text, kind if token.is_read else "predicted", token.is_learned)


def _shown_medium(medium: "PreparedMedium", recipe: Recipe) -> ShownMedium:
    title = f"{medium.kind} for {medium.unit}"
    tokens = f"{medium.llm_tokens:,} LLM tokens"
    pictures: list[Pixels] = []
    num_left_out = 0
    for item in medium.items:
        if item.cells is None:
            continue
        of_item = _pictures(item, medium, recipe)
        allowed = MAX_PICTURES_PER_MEDIUM - len(pictures)
        drawn = of_item[:allowed]
        pictures += drawn
        num_left_out += len(of_item) - len(drawn)
    size = _size_text(medium, pictures, len(pictures) + num_left_out)
    problem = None if pictures else "there is no picture of it: it cannot be decoded, or is kept as latents"
    return ShownMedium(title, f"{medium.name}: {size}, {tokens}", tuple(pictures), num_left_out, problem)


def _size_text(medium: "PreparedMedium", pictures: Sequence[Pixels], num_pictures: int) -> str:
    """Say how large a medium is for its unit."""
    first = medium.items[0]
    if medium.kind == "audio":
        return f"{sum(item.rows for item in medium.items):,} log-mel frames of 10 ms"
    patches = f"{first.cols} x {first.rows} patches"
    if not pictures:
        return patches
    height, width = pictures[0].shape[:2]
    what = "frames" if medium.kind == "video" else "tiles"
    several = f"{num_pictures} {what} of " if num_pictures > 1 else ""
    joined = f", {num_pictures // len(medium.items)} frames each" if num_pictures > len(medium.items) else ""
    return f"{several}{width} x {height} pixels, {patches}{joined}"


def _pictures(item: "PreparedItem", medium: "PreparedMedium", recipe: Recipe) -> list[Pixels]:
    """Return what a unit sees or hears of an item: one picture, the frames that its patches join, or a spectrogram."""
    from mmtrain.data.media.images import unpatchify

    assert item.cells is not None
    if medium.unit == GENERATOR:
        assert recipe.model.generator is not None
        if item.cells.dtype != np.uint8:  # latents are no picture
            return []
        return list(unpatchify(item.cells.astype(np.uint8), item.rows, item.cols, recipe.model.generator.patch))
    settings = recipe.model.all_encoders[medium.unit]
    if isinstance(settings, AudioSettings):
        return _spectrograms(item.cells)
    assert isinstance(settings, VisionSettings)
    frames = list(unpatchify(item.cells.astype(np.uint8), item.rows, item.cols, settings.patch))
    return frames if medium.kind == "video" else frames[:1]  # a picture is repeated in patches that join frames


def _spectrograms(cells: "NDArray[np.generic]") -> list[Pixels]:
    """Draw log-mel frames (frames, bins) from left to right, low tones at the bottom, in lines of equal length."""
    loudness = cells.astype(np.float64).T[::-1]
    lowest, highest = loudness.min(), loudness.max()
    share = (loudness - lowest) / max(highest - lowest, 1e-9)
    place = share * (len(_HEAT) - 1)
    below = np.minimum(place.astype(np.int64), len(_HEAT) - 2)
    weight = (place - below)[..., None]
    pixels = (_HEAT[below] * (1 - weight) + _HEAT[below + 1] * weight).round().astype(np.uint8)
    return [
        np.ascontiguousarray(pixels[:, start : start + _SPECTROGRAM_WIDTH_PX])
        for start in range(0, pixels.shape[1], _SPECTROGRAM_WIDTH_PX)
    ]
