"""Checks of layers that a recipe divides into model chunks itself (`layers_per_chunk`)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod

from mmtrain.recipe.raw_tree import KeyPath, Problem
from mmtrain.recipe.settings.modalities import GENERATOR, dotted_unit, unit_path
from mmtrain.recipe.settings.schema import Recipe

SETTING = "layers_per_chunk"
Division = tuple[int, ...]  # blocks of one unit in each model chunk


def check_layers_per_chunk(recipe: Recipe) -> Iterator[Problem]:
    """The numbers of blocks add up to the unit's, there is one for each chunk, and the units are in their order."""
    model = recipe.model
    blocks = {**{name: encoder.layers for name, encoder in model.all_encoders.items()}, "llm": model.llm.layers}
    divisions: dict[str, Division] = {}
    for unit in (*blocks, GENERATOR):
        division = recipe.parallel.of(unit).layers_per_chunk
        if not division:
            continue
        if unit not in blocks:
            text = "found for the generator, allowed for encoders and the LLM; use parallel.generator.pp"
            yield Problem(_path(unit), text)
            continue
        problems = list(_problems_of_unit(recipe, unit, division, blocks[unit]))
        yield from problems
        if not problems:
            divisions[unit] = division
    if recipe.parallel.placement == "unified":
        yield from _problems_of_one_pipeline(divisions)


def _problems_of_unit(recipe: Recipe, unit: str, division: Division, num_blocks: int) -> Iterator[Problem]:
    """Check the division of one unit by itself."""
    placement = recipe.parallel.placement
    if placement == "replicated":
        text = f"found {list(division)}, but in `replicated` every rank runs the whole unit; use another placement"
        yield Problem(_path(unit), text)
        return
    if sum(division) != num_blocks:
        text = (
            f"{' + '.join(map(str, division))} make {sum(division)} blocks, model.{dotted_unit(unit)}.layers is "
            f"{num_blocks}; the embedding, head or projector is not counted"
        )
        yield Problem(_path(unit), text)
        return
    empty = _empty_chunk_inside(division)
    if empty is not None:
        text = f"chunk {empty} (counted from 0) has none, and blocks lie before and after it; allowed there: at least 1"
        yield Problem(_path(unit), text)
    has_others = bool(recipe.model.all_encoders) or recipe.model.generator is not None
    shares_pipeline = placement in ("unified", "auto") and has_others
    if shares_pipeline:
        if 0 not in division:  # the unit's ranks are those of the pipeline only where it has blocks in all chunks
            yield from _problems_of_count(recipe, unit, division)
        return
    yield from _problems_of_count(recipe, unit, division)
    no_layer = next((i for i, number in enumerate(division) if not number and 0 < i < len(division) - 1), None)
    if no_layer is not None and empty is None:
        text = (
            f"chunk {no_layer} (counted from 0) has none, and only the first or last chunk may hold an embedding, head "
            "or projector alone; allowed there: at least 1"
        )
        yield Problem(_path(unit), text)


def _problems_of_count(recipe: Recipe, unit: str, division: Division) -> Iterator[Problem]:
    """There is a number for each chunk of each pipeline rank, as far as the recipe fixes these."""
    degrees = recipe.parallel.of(unit)
    fixed = {name: size for name in ("pp", "vpp") if (size := getattr(degrees, name)) is not None}
    needed = prod(fixed.values())
    is_exact = len(fixed) == 2 or fixed.get("pp") == 1  # several chunks are on several ranks
    if len(division) != needed if is_exact else len(division) % needed:
        named = " x ".join(f"parallel.{dotted_unit(unit)}.{name} {size}" for name, size in fixed.items())
        rule = f"{named} makes {needed} chunk{'s' * (needed > 1)}" if is_exact else f"{named} does not divide that"
        yield Problem(_path(unit), f"it has {len(division)} number{'s' * (len(division) > 1)}, and {rule}")


def _problems_of_one_pipeline(divisions: dict[str, Division]) -> Iterator[Problem]:
    """The units of one pipeline have as many chunks, and their blocks follow one another."""
    for (before, first), (after, second) in pairwise(divisions.items()):
        if len(first) != len(second):
            text = (
                f"it has {len(second)} numbers and parallel.{dotted_unit(before)}.{SETTING} {len(first)}; in `unified` "
                "both have one for each chunk of the one pipeline (0 where a unit has none)"
            )
            yield Problem(_path(after), text)
            continue
        last_before = max(i for i, number in enumerate(first) if number)
        first_after = min(i for i, number in enumerate(second) if number)
        if first_after < last_before:
            text = (
                f"chunk {first_after} (counted from 0) has blocks, but those of {before}, which come first, reach to "
                f"chunk {last_before}; use 0 before that chunk"
            )
            yield Problem(_path(after), text)


def _empty_chunk_inside(division: Sequence[int]) -> int | None:
    """Return a chunk without blocks between chunks with some."""
    held = [i for i, number in enumerate(division) if number]
    return next((i for i in range(held[0], held[-1]) if not division[i]), None)


def _path(unit: str) -> KeyPath:
    return ("parallel", *unit_path(unit), SETTING)
