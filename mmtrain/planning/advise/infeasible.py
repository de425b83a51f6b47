"""Explain why no mesh uses the available ranks: name contradicting settings and possible numbers of ranks."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product

from mmtrain.planning.artifact.plan import Placement
from mmtrain.planning.search.mesh_enumeration import Choices, shared_meshes
from mmtrain.planning.search.strategies import has_meshes
from mmtrain.planning.space.constraints import format_sizes
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.settings.modalities import dotted_unit
from mmtrain.recipe.settings.parallel_settings import ParallelSettings, UnitParallel
from mmtrain.recipe.settings.schema import Recipe

MAX_RANK_COUNT_DISTANCE = 64  # ranks more or fewer up to which other numbers of ranks are suggested
MAX_CLASHING_SETTINGS = 3  # settings that are named together; more would hardly help
_SETTINGS = ("tp", "pp", "dp", "vpp", "layers_per_chunk", "num_microbatches")


def nearest_rank_counts(choices: Choices, ranks: int, placements: Sequence[Placement]) -> list[int]:
    """Return the next smaller and the next larger possible number of ranks, as far as there are such nearby."""

    def is_possible(count: int) -> bool:
        return any(has_meshes(choices, count, placement) for placement in placements)

    smaller = range(ranks - 1, max(ranks - MAX_RANK_COUNT_DISTANCE, 0), -1)
    larger = range(ranks + 1, ranks + MAX_RANK_COUNT_DISTANCE)
    nearest = [next(filter(is_possible, counts), None) for counts in (smaller, larger)]
    return [count for count in nearest if count is not None]


def explain_infeasible(
    recipe: Recipe,
    choices: Choices,
    ranks: int,
    placements: Sequence[Placement],
    choices_of: Callable[[Recipe], Choices],
) -> str:
    """Explain why no mesh of `placements` uses `ranks` ranks, and name the settings that contradict each other.

    Args:
        recipe: the recipe.
        choices: the mesh sizes that it allows, by unit.
        ranks: the number of ranks that no mesh uses.
        placements: the placements that it allows.
        choices_of: returns the mesh sizes that a recipe allows. It is called for the recipe with fewer settings.
    """
    limit = recipe.parallel.max_gpus
    number = f"{ranks} rank{'s' * (ranks > 1)}"
    requested = f"exactly {number}" if limit is None else f"at most {number} (parallel.max_gpus {limit})"
    lines = [f"no plan uses {requested}."]
    for placement in placements:
        cause = _explain_placement(recipe.parallel, choices, ranks, placement)
        clash = _name_clash(recipe, choices, ranks, placement, choices_of)
        lines.append(f"  {placement}: " + (f"{clash}: {cause}" if clash else cause))
    counts = " or ".join(map(str, nearest_rank_counts(choices, ranks, placements)))
    possible = f"; possible: {counts}" if counts else ""
    lines.append(f"Change the constraints under `parallel`, train.global_batch, or the number of ranks{possible}.")
    return "\n".join(lines)


def _name_clash(
    recipe: Recipe,
    choices: Choices,
    ranks: int,
    placement: Placement,
    choices_of: Callable[[Recipe], Choices],
) -> str:
    """Name the fewest settings with which alone no mesh is possible; empty where none is possible without any."""
    if not has_meshes(choices_of(_with_only(recipe, ())), ranks, placement):
        return ""
    settings = list(_fixed_settings(recipe.parallel, choices))
    for count in range(1, MAX_CLASHING_SETTINGS + 1):
        for subset in combinations(settings, count):
            if not has_meshes(choices_of(_with_only(recipe, subset)), ranks, placement):
                named = [f"parallel.{dotted_unit(unit)}.{key} {_in_words(recipe, unit, key)}" for unit, key in subset]
                return f"{' and '.join(named)} {'contradict each other' if count > 1 else 'cannot be met'}"
    return ""


def _in_words(recipe: Recipe, unit: str, key: str) -> str:
    value = getattr(recipe.parallel.of(unit), key)
    return str(list(value) if isinstance(value, tuple) else value)


def _fixed_settings(parallel: ParallelSettings, choices: Choices) -> Iterator[tuple[str, str]]:
    """Return unit and name of every mesh size that the recipe fixes."""
    for unit, key in product(choices, _SETTINGS):
        if getattr(parallel.of(unit), key) not in (None, ()):
            yield unit, key


def _with_only(recipe: Recipe, settings: Sequence[tuple[str, str]]) -> Recipe:
    """Return the recipe with these mesh sizes fixed, given by unit and name, and no others."""
    parallel = recipe.parallel

    def cleared(unit: str) -> UnitParallel:
        fields = UnitParallel.model_fields
        left_out = {key: fields[key].default for key in _SETTINGS if (unit, key) not in settings}
        return parallel.of(unit).model_copy(update=left_out)

    changes: dict[str, object] = {name: cleared(name) for name, value in parallel if isinstance(value, UnitParallel)}
    changes["encoders"] = {name: cleared(name) for name in parallel.encoders}
    return recipe.model_copy(update={"parallel": parallel.model_copy(update=changes)})


def _explain_placement(parallel: ParallelSettings, choices: Choices, ranks: int, placement: Placement) -> str:
    """Say what the placement requires of meshes, and which mesh sizes are allowed."""
    fixed = {f"parallel.{dotted_unit(unit)}.{key}": key for unit, key in _fixed_settings(parallel, choices)}
    allowed = "; ".join(map(str, choices.values()))
    if fixed:
        allowed += "; fixed by " + ", ".join(fixed)
    if placement == "colocated":
        others = " and ".join(unit for unit in choices if unit != LLM)
        return f"no mesh of {others} whose tp and pp divide the LLM's fills the LLM's {ranks} ranks ({allowed})"
    if placement == "replicated":
        rule = f"every unit runs on all {ranks} ranks with one tp for all units, pp 1, and a dp x cp of {ranks} / tp"
        return f"{rule} ({allowed})"
    if placement == "disaggregated":
        units = " and ".join(choices)
        if len(choices) > ranks:
            return (
                f"{units} on separate ranks need at least {len(choices)} ranks; parallel.placement: unified lets them "
                "share ranks"
            )
        return f"no meshes of {units} add up to exactly {ranks} ranks ({allowed})"
    if not any(all(unit.tp_beside(tp) for unit in choices.values()) for tp in choices[LLM].tp):
        rule = "in one pipeline the tp of an encoder is the LLM's or a divisor of it, and that of a generator the LLM's"
        return f"{_sizes_of_units(choices, 'tp')} do not go together: {rule}"
    if not any(True for _ in shared_meshes(choices)):
        rule = "in one pipeline the dp of another unit is the LLM's, times cp, times the LLM's tp over its own"
        return f"{_sizes_of_units(choices, 'dp')} do not go together: {rule}"
    return _explain_unified(parallel, choices, ranks, allowed)


def _sizes_of_units(choices: Choices, key: str) -> str:
    """Name one size of every unit with the values that are allowed."""
    named = (f"parallel.{dotted_unit(name)}.{key} ({format_sizes(getattr(u, key))})" for name, u in choices.items())
    return " and ".join(named)


def _explain_unified(parallel: ParallelSettings, choices: Choices, ranks: int, allowed: str) -> str:
    """Say why no pipeline over all units has the number of ranks, where the units agree in tp and in dp."""
    for unit in choices:
        fixed = {key: getattr(parallel.of(unit), key) for key in ("tp", "dp")}
        shared = {f"parallel.{dotted_unit(unit)}.{key}": size for key, size in fixed.items() if size is not None}
        ranks_per_stage = math.prod(shared.values())
        if ranks % ranks_per_stage:
            return f"{' x '.join(shared)} make {ranks_per_stage} ranks, which does not divide {ranks}"
    spans = [f"parallel.{dotted_unit(unit)}.pp" for unit in choices if parallel.of(unit).pp is not None]
    meaning = f"; {' and '.join(spans)}: the ranks of the one pipeline that hold layers of the unit" if spans else ""
    return f"no tp x pp x dp makes exactly {ranks} ranks ({allowed}{meaning})"
