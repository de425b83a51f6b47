"""Why no sizes use the ranks that there are: the settings that clash, and the numbers of ranks that would do."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

from mmtrain.plan.artifact.plan import Placement
from mmtrain.plan.colocated.colocated_search import has_colocated_meshes
from mmtrain.plan.search.constraints import UnitChoices, format_sizes
from mmtrain.plan.search.mesh_enumeration import has_pipelined_meshes
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.schema import ParallelSettings, Recipe, UnitParallel

MAX_RANK_COUNT_DISTANCE = 64  # ranks more or less
_SETTINGS = ("tp", "pp", "dp", "vpp", "num_microbatches")
Choices = Mapping[str, UnitChoices]


def has_meshes(choices: Choices, ranks: int, placement: Placement) -> bool:
    """Whether a placement has sizes that use exactly so many ranks."""
    if placement == "colocated":
        # Only encoders can share the LLM's ranks.
        return "generator" not in choices and has_colocated_meshes(choices, ranks)
    return has_pipelined_meshes(choices, ranks, placement)


def nearest_rank_counts(choices: Choices, ranks: int, placements: Sequence[Placement]) -> list[int]:
    """The next smaller and the next larger number of ranks that some sizes make up, if there are such nearby."""

    def possible(count: int) -> bool:
        return any(has_meshes(choices, count, placement) for placement in placements)

    below = next((n for n in range(ranks - 1, max(ranks - MAX_RANK_COUNT_DISTANCE, 0), -1) if possible(n)), None)
    above = next((n for n in range(ranks + 1, ranks + MAX_RANK_COUNT_DISTANCE) if possible(n)), None)
    return [n for n in (below, above) if n is not None]


def explain_infeasible(
    recipe: Recipe,
    choices: Choices,
    ranks: int,
    placements: Sequence[Placement],
    choices_of: Callable[[Recipe], Choices],
) -> str:
    """Explain why no layout of `placements` uses `ranks` ranks, and name the settings that clash.

    choices_of: what a recipe allows; it is asked of the recipe with few of its settings.
    """
    limit = recipe.parallel.max_gpus
    number = f"{ranks} rank{'s' * (ranks > 1)}"
    wanted = f"exactly {number}" if limit is None else f"at most {number} (parallel.max_gpus {limit})"
    lines = [f"no plan uses {wanted}."]
    for placement in placements:
        why = _why(recipe.parallel, choices, ranks, placement)
        clash = _clash(recipe, choices, ranks, placement, choices_of)
        lines.append(f"  {placement}: " + (f"{clash}: {why}" if clash else why))
    near = nearest_rank_counts(choices, ranks, placements)
    do = f": {' or '.join(map(str, near))} would do." if near else "."
    lines.append(f"Change the constraints under `parallel`, train.global_batch, or the number of ranks{do}")
    return "\n".join(lines)


def _clash(
    recipe: Recipe,
    choices: Choices,
    ranks: int,
    placement: Placement,
    choices_of: Callable[[Recipe], Choices],
) -> str:
    """The fewest settings, at most three, which alone leave no sizes; empty where even none leave any."""
    if not has_meshes(choices_of(_with_only(recipe, ())), ranks, placement):
        return ""
    settings = list(_settings(recipe.parallel, choices))
    for count in (1, 2, 3):
        for some in combinations(settings, count):
            if not has_meshes(choices_of(_with_only(recipe, some)), ranks, placement):
                named = [f"parallel.{unit}.{key} {getattr(getattr(recipe.parallel, unit), key)}" for unit, key in some]
                return f"{' and '.join(named)} {'do not go together' if count > 1 else 'cannot be met'}"
    return ""


def _settings(parallel: ParallelSettings, choices: Choices) -> Iterator[tuple[str, str]]:
    """Unit and name of every size that the recipe fixes."""
    for unit, key in product(choices, _SETTINGS):
        if getattr(getattr(parallel, unit), key) is not None:
            yield unit, key


def _with_only(recipe: Recipe, kept: Sequence[tuple[str, str]]) -> Recipe:
    """The recipe with these sizes of units, by unit and setting, and no others."""
    free: dict[str, UnitParallel] = {}
    for unit in type(recipe.parallel).model_fields:
        if isinstance(found := getattr(recipe.parallel, unit), UnitParallel):
            free[unit] = found.model_copy(update={key: None for key in _SETTINGS if (unit, key) not in kept})
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=free)})


def _why(parallel: ParallelSettings, choices: Choices, ranks: int, placement: Placement) -> str:
    """What the placement asks of sizes, and those that there are."""
    possible = "; ".join(map(str, choices.values()))
    fixed = {
        f"parallel.{unit}.{key}": (key, getattr(parallel, unit).__dict__[key])
        for unit, key in _settings(parallel, choices)
    }
    if fixed:
        possible += "; fixed by " + ", ".join(fixed)
    if placement == "colocated" and "generator" in choices:
        return "a generator is behind the LLM, not in its idle times"
    if placement == "colocated":
        encoders = " and ".join(name for name in choices if name != LLM)
        return f"no sizes of {encoders} whose tp and pp divide the LLM's fill the LLM's {ranks} ranks ({possible})"
    if placement == "disaggregated":
        if len(choices) > ranks:
            return f"{' and '.join(choices)} on ranks of their own need at least {len(choices)} ranks"
        return f"no sizes of {' and '.join(choices)} add up to exactly {ranks} ranks ({possible})"
    for key in ("tp", "dp"):
        common = set.intersection(*(set(getattr(c, key)) for c in choices.values()))
        if not common:
            settings = " and ".join(
                f"parallel.{c.name}.{key} ({format_sizes(getattr(c, key))})" for c in choices.values()
            )
            return f"{settings} have no size in common, but all units share one {key} there"
    shared = {path: size for path, size in fixed.items() if size[0] in ("tp", "dp")}
    together = math.prod(dict(shared.values()).values())
    if ranks % together:
        return f"{' x '.join(shared)} make {together} ranks, which does not divide {ranks}"
    return f"no tp x pp x dp makes exactly {ranks} ranks ({possible})"
