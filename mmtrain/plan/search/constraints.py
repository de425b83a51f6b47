"""What the recipe and the model allow: mesh sizes of each unit, and the errors when that is nothing."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from mmtrain.errors import PlanError
from mmtrain.models.model_shape import ModelShape, UnitShape
from mmtrain.plan.artifact.layout import MeshSize
from mmtrain.plan.budget import DEFAULT_BUDGET, MeshBudget
from mmtrain.program.ir.graph import LLM
from mmtrain.recipe.modalities import other_units
from mmtrain.recipe.schema import ParallelSettings, Recipe, UnitParallel

_SIZES = ("tp", "pp", "dp")
RecomputeMode = Literal["none", "all", "auto"]  # what the recipe says of a unit
SequenceParallelSetting = Literal["auto"] | bool  # the same of `sp`


@dataclass(frozen=True)
class UnitChoices:
    """The mesh sizes one unit may have: every combination of these that makes the number of ranks."""

    name: str
    tp: tuple[int, ...]
    pp: tuple[int, ...]  # in `unified`: pipeline ranks that hold layers of the unit
    dp: tuple[int, ...]
    vpp: tuple[int, ...]  # chunks of a pipeline rank
    layers: int
    batch: int  # LLM microbatches in a step, of all replicas
    fixed_microbatches: int | None  # of each replica, where the recipe says
    fixed_vpp: int | None = None  # likewise
    is_whole: bool = False  # all layers in one stage, whatever the recipe says

    def sizes(self, ranks: int) -> Iterator[MeshSize]:
        """All sizes of exactly `ranks` ranks."""
        for tp in self.tp:
            for dp in self.dp:
                pp, rest = divmod(ranks, tp * dp)
                if rest == 0 and pp in self.pp:
                    yield MeshSize(tp, pp, dp)

    def __str__(self) -> str:
        tp, pp, dp = (format_sizes(v) for v in (self.tp, self.pp, self.dp))
        return f"{self.name}: tp {tp}; pp {pp}; dp {dp}" + (f"; vpp {self.fixed_vpp}" if self.fixed_vpp else "")


def unit_choices(
    recipe: Recipe, shape: ModelShape, ranks_per_node: int, budget: MeshBudget = DEFAULT_BUDGET.meshes
) -> dict[str, UnitChoices]:
    """Return the mesh sizes that each unit may have.

    Raises:
        PlanError: a size fixed in the recipe is not among those possible; all such problems at once.
    """
    problems = [*_placement_problems(recipe, shape)]
    choices = {}
    for unit in shape.units:
        fixed: UnitParallel = getattr(recipe.parallel, unit.name)
        possible = {
            "tp": _tensor_sizes(unit, ranks_per_node) if unit.is_splittable else (1,),
            "pp": tuple(range(1, len(unit.layers) + 1)) if unit.is_splittable else (1,),
            "dp": _divisors(recipe.train.global_batch),
            "vpp": tuple(n for n in _vpp_sizes(unit, budget) if n <= len(unit.layers)),
        }
        for key, why in _reasons(unit, ranks_per_node, recipe.train.global_batch).items():
            value = getattr(fixed, key)
            if value is not None and value not in possible[key]:
                where = f"parallel.{unit.name}.{key}"
                problems.append(f"{where}: {value} {why}; allowed: {format_sizes(possible[key])}")
            elif value is not None:
                possible[key] = (value,)
        if unit.name == LLM:
            possible["dp"] = tuple(dp for dp in possible["dp"] if _suits_microbatches(dp, recipe))
        if fixed.vpp is not None and fixed.vpp > len(unit.layers):
            where = f"parallel.{unit.name}.vpp"
            problems.append(f"{where}: {fixed.vpp} is more than {unit.name}'s {len(unit.layers)} layers")
        elif fixed.vpp is not None:
            possible["vpp"] = (fixed.vpp,)
        choices[unit.name] = UnitChoices(
            unit.name,
            **possible,
            layers=len(unit.layers),
            batch=recipe.train.global_batch,
            fixed_microbatches=fixed.num_microbatches,
            fixed_vpp=fixed.vpp,
            is_whole=not unit.is_splittable,
        )
    if not problems and not choices[LLM].dp:
        fixed_here = ", ".join(f"{path} {n}" for path, n in fixed_microbatches(recipe.parallel, choices).items())
        problems.append(
            f"{fixed_here}: no size of parallel.llm.dp suits; the LLM has train.global_batch "
            f"({recipe.train.global_batch}) / dp microbatches, of which an encoder's are a divisor or a multiple"
        )
    if problems:
        raise PlanError("\n".join(problems))
    return choices


def encoder_microbatches(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """Microbatches of each replica of those units beside the LLM whose number the recipe fixes."""
    others = [unit.name for unit in shape.units if unit.name != LLM]
    fixed = {name: getattr(recipe.parallel, name).num_microbatches for name in others}
    return {name: n for name, n in fixed.items() if n is not None}


def fixed_microbatches(parallel: ParallelSettings, units: Iterable[str]) -> dict[str, int]:
    """The numbers of microbatches that the recipe fixes, by dotted path."""
    fixed = {f"parallel.{name}.num_microbatches": getattr(parallel, name).num_microbatches for name in units}
    return {path: n for path, n in fixed.items() if n is not None}


def _suits_microbatches(dp: int, recipe: Recipe) -> bool:
    """Whether the LLM with `dp` replicas has the number of microbatches asked for, and encoders can follow it."""
    asked, has = recipe.parallel.llm.num_microbatches, recipe.train.global_batch // dp
    others = [getattr(recipe.parallel, name).num_microbatches or has for name in other_units()]
    return asked in (None, has) and all(n % has == 0 or has % n == 0 for n in others)


def _placement_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    names = [unit.name for unit in shape.units]
    if names == [LLM] and (wanted := recipe.parallel.placement) in ("disaggregated", "colocated"):
        yield f"parallel.placement: `{wanted}` needs an encoder, but the model has none; use `unified`"
    absent = [name for name in other_units() if name not in names]
    for name, key in product(absent, (*_SIZES, "vpp", "num_microbatches")):
        if getattr(getattr(recipe.parallel, name), key) is not None:
            yield f"parallel.{name}.{key} is set, but model.{name} is not: remove it"


def _reasons(unit: UnitShape, ranks_per_node: int, global_batch: int) -> dict[str, str]:
    heads = next(layer for layer in unit.layers if layer.heads)
    return {
        "tp": f"is not a power of two that divides {unit.name}'s heads ({heads.heads}) and inner width ({heads.ffn}), "
        f"and divides kv_heads ({heads.kv_heads}) or is a multiple of them, within a node of {ranks_per_node} ranks",
        "pp": f"is more than {unit.name}'s {len(unit.layers)} layers",
        "dp": f"does not divide train.global_batch ({global_batch})",
    }


def _vpp_sizes(unit: UnitShape, budget: MeshBudget) -> tuple[int, ...]:
    if unit.name == LLM:
        return budget.llm_vpp
    return budget.encoder_vpp if unit.kind == "encoder" else (1,)


def _tensor_sizes(unit: UnitShape, ranks_per_node: int) -> tuple[int, ...]:
    key_value = [2 * layer.kv_heads * layer.head_dim for layer in unit.layers]
    widths = [n for layer in unit.layers for n in (layer.heads, layer.ffn, layer.vocab) if n] + key_value
    kv_heads = [layer.kv_heads for layer in unit.layers if layer.kv_heads]
    powers = (2**i for i in range(ranks_per_node.bit_length()))
    return tuple(
        tp for tp in powers if all(n % tp == 0 for n in widths) and all(n % tp == 0 or tp % n == 0 for n in kv_heads)
    )


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)


def format_sizes(values: tuple[int, ...]) -> str:
    """Print sizes: `1, 2, 4`, or `1-34` for a long unbroken range."""
    if len(values) > 4 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ", ".join(map(str, values))
