"""The mesh sizes of each unit that the recipe and the model allow, and the errors where they allow none."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from mmtrain.costs import preset
from mmtrain.errors import PlanError, UserError
from mmtrain.models.shapes.layer_shape import Attention, MoeMlp
from mmtrain.models.shapes.model_shape import ModelShape, UnitShape, build_model_shape
from mmtrain.planning.artifact.layout import MeshSize
from mmtrain.planning.space.budget import DEFAULT_BUDGET, MeshBudget
from mmtrain.program.ir.graph import LLM, ContextMethod, CutSequences
from mmtrain.recipe.checks.context_checks import context_methods
from mmtrain.recipe.settings.modalities import dotted_unit, other_units
from mmtrain.recipe.settings.parallel_settings import ParallelSettings, UnitParallel
from mmtrain.recipe.settings.schema import Recipe

_SETTINGS = ("tp", "pp", "dp", "vpp", "layers_per_chunk", "num_microbatches")
RecomputeMode = Literal["none", "all", "auto"]  # which layers of a unit the recipe has recomputed as a whole
SequenceParallelSetting = Literal["auto"] | bool  # the same of `sp`
TpOverlapSetting = Literal["auto"] | bool  # the same of `tp_overlap`


@dataclass(frozen=True)
class UnitChoices:
    """The mesh sizes one unit may have: every combination of these that makes the number of ranks."""

    name: str
    tp: tuple[int, ...]
    pp: tuple[int, ...]  # in `unified`: pipeline ranks that hold layers of the unit
    dp: tuple[int, ...]
    vpp: tuple[int, ...]  # model chunks per pipeline rank
    num_layers: int
    global_batch: int  # LLM microbatches in a step, of all replicas
    fixed_microbatches: int | None  # of each replica, where the recipe fixes them
    fixed_vpp: int | None = None  # likewise
    is_whole: bool = False  # all layers are one stage, whatever the recipe says, and every rank of a TP group runs it
    fixed_dp: int | None = None
    is_encoder: bool = False
    cp: tuple[int, ...] = (1,)  # ranks that may share sequences; only the LLM's do
    cp_methods: tuple[tuple[int, int, ContextMethod], ...] = ()  # (tp, cp, method) for each cp above 1 that is possible
    cp_split: CutSequences = "auto"
    layers_per_chunk: tuple[int, ...] | None = None  # blocks in each model chunk, where the recipe divides the unit
    ep: int = 1  # replicas that hold experts together

    @property
    def num_chunks(self) -> int | None:
        """Return the model chunks of the unit's pipeline, where the recipe divides its layers."""
        return None if self.layers_per_chunk is None else len(self.layers_per_chunk)

    def fixed_vpp_on(self, pp: int) -> int | None:
        """Return the model chunks per rank that the recipe fixes for so many pipeline ranks; None where it does not."""
        return self.fixed_vpp if self.num_chunks is None else max(self.num_chunks // pp, 1)

    def allows_chunks(self, pp: int, vpp: int) -> bool:
        """Return whether the recipe allows a pipeline of so many ranks with so many model chunks on each.

        Several chunks that the recipe divides are several ranks': on one they would only cost time.
        """
        is_division = self.num_chunks is None or (self.num_chunks == pp * vpp and (pp > 1 or vpp == 1))
        return self.fixed_vpp in (None, vpp) and is_division

    def with_experts(self, meshes: Iterable[MeshSize]) -> Iterator[MeshSize]:
        """Yield those of the meshes whose replicas make whole groups that hold experts together."""
        return (replace(mesh, ep=self.ep) for mesh in meshes if mesh.num_replicas % self.ep == 0)

    def context_meshes(self, mesh: MeshSize) -> Iterator[MeshSize]:
        """List the meshes with this tp, pp, dp and vpp, for each number of ranks that may share sequences."""
        if 1 in self.cp:
            yield mesh
        for tp, cp, method in self.cp_methods:
            if tp == mesh.tp:
                yield replace(mesh, cp=cp, cp_method=method, cp_split=self.cp_split)

    def fixed_to(self, mesh: MeshSize) -> "UnitChoices":
        """Return the choices with only this mesh among them."""
        methods = tuple(entry for entry in self.cp_methods if entry[1] == mesh.cp)
        return replace(
            self, tp=(mesh.tp,), pp=(mesh.pp,), dp=(mesh.dp,), vpp=(mesh.vpp,), cp=(mesh.cp,), cp_methods=methods
        )

    def tp_beside(self, llm_tp: int) -> int | None:
        """Return the tensor-parallel size on the ranks of an LLM with this one, in the same pipeline, if there is any.

        That is the LLM's own where it is possible. Else an encoder has the least that it may have, if that divides the
        LLM's: 1, unless the recipe fixes it. Larger ones would only save memory that a pipeline saves, too.
        """
        if llm_tp in self.tp:
            return llm_tp
        least = min(self.tp)
        return least if self.is_encoder and llm_tp % least == 0 else None

    @property
    def own_tp(self) -> tuple[int, ...]:
        """Return the tensor-parallel sizes that make sense on ranks of the unit's own: a whole unit gains nothing."""
        return self.tp[:1] if self.is_whole else self.tp

    def spanned_chunks(self, mesh: MeshSize) -> int | None:
        """Return how many consecutive model chunks of a pipeline of all units hold the unit; None where that is open.

        A unit whose `pp` is the pipeline's has layers in every chunk, as Megatron-LM divides an LLM behind an encoder
        in its first chunk. A unit of fewer pipeline ranks spans them in one round.
        """
        if len(self.pp) > 1:
            return None
        return mesh.pp * mesh.vpp if self.pp[0] == mesh.pp and not self.is_whole else self.pp[0]

    def meshes(self, num_ranks: int) -> Iterator[MeshSize]:
        """List every mesh of exactly `num_ranks` ranks, with one model chunk per rank."""
        for tp in self.tp:
            for dp in self.dp:
                pp, rest = divmod(num_ranks, tp * dp)
                if rest == 0 and pp in self.pp:
                    yield MeshSize(tp, pp, dp)

    def __str__(self) -> str:
        tp, pp, dp = (format_sizes(sizes) for sizes in (self.tp, self.pp, self.dp))
        cp = "" if self.cp == (1,) else f"; cp {format_sizes(self.cp)}"
        vpp = f"; vpp {self.fixed_vpp}" if self.fixed_vpp else ""
        chunks = f"; {self.num_chunks} chunks" if self.num_chunks else ""
        experts = f", of which ep {self.ep} divides dp x cp" if self.ep > 1 else ""
        return f"{self.name}: tp {tp}{cp}; pp {pp}; dp {dp}{vpp}{chunks}{experts}"


def unit_choices(
    recipe: Recipe, shape: ModelShape, ranks_per_node: int, budget: MeshBudget = DEFAULT_BUDGET.meshes
) -> dict[str, UnitChoices]:
    """Return the mesh sizes that each unit may have.

    Raises:
        PlanError: a size fixed in the recipe is not possible; names all such problems at once.
    """
    problems = [*_placement_problems(recipe, shape)]
    choices = {}
    for unit in shape.units:
        fixed = recipe.parallel.of(unit.name)
        possible = _possible_sizes(unit, recipe.train.num_groups, ranks_per_node, budget)
        problems += _fix_sizes(possible, fixed, unit, _rules(unit, ranks_per_node, recipe.train.num_groups))
        if unit.name == LLM:
            possible["dp"] = tuple(dp for dp in possible["dp"] if _suits_microbatches(dp, recipe))
        choices[unit.name] = UnitChoices(
            unit.name,
            tp=possible["tp"],
            pp=possible["pp"],
            dp=possible["dp"],
            vpp=possible["vpp"],
            num_layers=len(unit.layers),
            global_batch=recipe.train.num_groups,
            fixed_microbatches=fixed.num_microbatches,
            fixed_vpp=fixed.vpp,
            is_whole=not unit.is_splittable,
            fixed_dp=fixed.dp,
            is_encoder=unit.kind == "encoder",
            layers_per_chunk=fixed.layers_per_chunk or None,
            ep=expert_parallel_size(unit),
        )
        if unit.name == LLM:
            choices[LLM] = _with_shared_sequences(choices[LLM], recipe, ranks_per_node, budget)
    if not problems and not choices[LLM].dp:
        settings = fixed_microbatches(recipe.parallel, choices).items()
        problems.append(
            f"{', '.join(f'{path} {number}' for path, number in settings)}: no size of parallel.llm.dp suits; the LLM "
            f"has train.global_batch ({recipe.train.num_groups}) / dp microbatches, of which an encoder's are a "
            "divisor or a multiple"
        )
    if problems:
        raise PlanError("\n".join(problems))
    return choices


def expert_parallel_size(unit: UnitShape) -> int:
    """Return how many replicas of a unit hold its experts together; 1 without experts."""
    return next((layer.mlp.ep for layer in unit.layers if isinstance(layer.mlp, MoeMlp)), 1)


def _with_shared_sequences(llm: UnitChoices, recipe: Recipe, ranks_per_node: int, budget: MeshBudget) -> UnitChoices:
    """Return the LLM's choices with those of how ranks may share its sequences.

    Where the recipe leaves the method open, an all-to-all is used inside a node, where it moves less than a ring hides,
    and a ring between nodes, which hides its messages behind attention; the other where only that is possible.
    """
    degrees = recipe.parallel.llm
    sizes = context_parallel_sizes(recipe, budget)
    methods: list[tuple[int, int, ContextMethod]] = []
    for tp, cp in product(llm.tp, sizes):
        possible = context_methods(recipe, tp, cp) if cp > 1 else ()
        if degrees.cp_method != "auto":
            possible = tuple(method for method in possible if method == degrees.cp_method)
        preferred: ContextMethod = "ulysses" if tp * cp <= ranks_per_node else "ring"
        if possible:
            methods.append((tp, cp, preferred if preferred in possible else possible[0]))
    is_possible = {1, *(cp for _, cp, _ in methods)}
    cp_sizes = tuple(cp for cp in sizes if cp in is_possible)
    return replace(llm, cp=cp_sizes, cp_methods=tuple(methods), cp_split=degrees.cp_split)


def context_parallel_sizes(recipe: Recipe, budget: MeshBudget) -> list[int]:
    """Return the context-parallel degrees to try: the recipe's, or several if it leaves them open.

    Those are the powers of two, from 1, that leave each rank enough tokens of the longest microbatches.
    """
    if recipe.parallel.llm.cp is not None:
        return [recipe.parallel.llm.cp]
    seq_len = recipe.data.group_tokens
    if seq_len < budget.min_tokens_to_share or recipe.model.generator is not None:
        return [1]
    return [2**i for i in range(max(seq_len // budget.min_tokens_per_cp_rank, 1).bit_length())]


def encoder_microbatches(recipe: Recipe, shape: ModelShape) -> dict[str, int]:
    """Return the microbatches of each replica for units other than the LLM, where the recipe fixes them."""
    others = [unit.name for unit in shape.units if unit.name != LLM]
    fixed = {unit: recipe.parallel.of(unit).num_microbatches for unit in others}
    return {unit: number for unit, number in fixed.items() if number is not None}


def fixed_microbatches(parallel: ParallelSettings, units: Iterable[str]) -> dict[str, int]:
    """Return the numbers of microbatches that the recipe fixes, by dotted path."""
    fixed = {f"parallel.{dotted_unit(unit)}.num_microbatches": parallel.of(unit).num_microbatches for unit in units}
    return {path: number for path, number in fixed.items() if number is not None}


def format_sizes(values: tuple[int, ...]) -> str:
    """Format sizes as `1, 2, 4`, or as `1-34` for a long unbroken range."""
    if len(values) > 4 and values == tuple(range(values[0], values[-1] + 1)):
        return f"{values[0]}-{values[-1]}"
    return ", ".join(map(str, values))


def _possible_sizes(
    unit: UnitShape, global_batch: int, ranks_per_node: int, budget: MeshBudget
) -> dict[str, tuple[int, ...]]:
    """Return what the model allows, by setting."""
    num_layers = len(unit.layers)
    return {
        "tp": _tensor_parallel_sizes(unit, ranks_per_node),
        "pp": tuple(range(1, num_layers + 1)) if unit.is_splittable else (1,),
        "dp": tuple(dp for dp in range(1, global_batch + 1) if global_batch % dp == 0),
        "vpp": tuple(vpp for vpp in _vpp_to_try(unit, budget) if vpp <= num_layers),
    }


def _fix_sizes(
    possible: dict[str, tuple[int, ...]], fixed: UnitParallel, unit: UnitShape, rules: dict[str, str]
) -> Iterator[str]:
    """Restrict `possible` to the sizes that the recipe fixes; yield a problem for each that is not possible.

    rules: by setting, the rule that an impossible size breaks.
    """
    for key, rule in rules.items():
        size = getattr(fixed, key)
        if size is not None and size not in possible[key]:
            yield f"parallel.{dotted_unit(unit.name)}.{key}: {size} {rule}; allowed: {format_sizes(possible[key])}"
        elif size is not None:
            possible[key] = (size,)
    if fixed.vpp is not None and fixed.vpp > len(unit.layers):
        path = f"parallel.{dotted_unit(unit.name)}.vpp"
        yield f"{path}: {fixed.vpp} is more than {unit.name}'s {len(unit.layers)} layers"
    elif fixed.vpp is not None:
        possible["vpp"] = (fixed.vpp,)


def _rules(unit: UnitShape, ranks_per_node: int, global_batch: int) -> dict[str, str]:
    """Return what is wrong with a size that is not possible, by setting."""
    attention = next(layer.mixer for layer in unit.layers if isinstance(layer.mixer, Attention))
    mlps = {layer.mlp for layer in unit.layers if layer.mlp is not None and layer.mixer is not None}
    widths = sorted({width for mlp in mlps for width in mlp.divided_widths})
    inner_width, kv_heads = " and ".join(map(str, widths)), attention.kv_heads
    mixers = [layer.mixer for layer in unit.layers if layer.mixer is not None]
    all_heads = dict.fromkeys(mixer.heads if isinstance(mixer, Attention) else mixer.key_heads for mixer in mixers)
    heads = " and ".join(map(str, all_heads))  # a resampler may have another number
    tp_rule = (
        f"is not a power of two that divides {unit.name}'s heads ({heads}) and inner width ({inner_width}), "
        f"and divides kv_heads ({kv_heads}) or is a multiple of them, within a node of {ranks_per_node} ranks"
    )
    pp_rule = f"is more than {unit.name}'s {len(unit.layers)} layers"
    if not unit.is_splittable:
        tp_rule = f"is not a power of two within a node of {ranks_per_node} ranks"
        pp_rule = "stages for a U-Net, which is one stage (skip connections join its ends; use dp)"
    return {
        "tp": tp_rule,
        "pp": pp_rule,
        "dp": f"does not divide train.global_batch ({global_batch})",
    }


def _suits_microbatches(dp: int, recipe: Recipe) -> bool:
    """Return whether the LLM with `dp` replicas has the microbatches that the recipe fixes, and encoders can follow."""
    fixed, num_llm = recipe.parallel.llm.num_microbatches, recipe.train.num_groups // dp
    others = [recipe.parallel.of(unit).num_microbatches or num_llm for unit in other_units(recipe.model)]
    return fixed in (None, num_llm) and all(number % num_llm == 0 or num_llm % number == 0 for number in others)


def _placement_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    units = [unit.name for unit in shape.units]
    placement = recipe.parallel.placement
    if units == [LLM] and placement in ("disaggregated", "colocated"):
        yield f"parallel.placement: `{placement}` needs an encoder, but the model has none; use `unified`"
    absent = [unit for unit in other_units(recipe.model) if unit not in units]
    for unit, key in product(absent, _SETTINGS):
        if getattr(recipe.parallel.of(unit), key) not in (None, ()):
            yield f"parallel.{unit}.{key} is set, but model.{unit} is not: remove it"


def _vpp_to_try(unit: UnitShape, budget: MeshBudget) -> tuple[int, ...]:
    if unit.name == LLM:
        return budget.llm_vpp
    return budget.encoder_vpp if unit.kind == "encoder" else (1,)


def _tensor_parallel_sizes(unit: UnitShape, ranks_per_node: int) -> tuple[int, ...]:
    """Return the powers of two within a node that divide every matrix of the unit; all of them if nothing is split."""
    sizes = tuple(2**i for i in range(ranks_per_node.bit_length()))
    if not unit.is_splittable:
        return sizes
    mixers = {layer.mixer for layer in unit.layers if layer.mixer is not None}
    widths = {layer.vocab for layer in unit.layers}
    widths |= {width for layer in unit.layers if layer.mlp is not None for width in layer.mlp.divided_widths}
    widths |= {width for mixer in mixers for width in mixer.divided_widths}
    widths |= {layer.out for layer in unit.layers if layer.kind == "merger"}  # outputs of its convolution
    kv_heads = {mixer.kv_heads for mixer in mixers if isinstance(mixer, Attention)}

    def divides_all(tp: int) -> bool:
        # More ranks than key-value heads hold copies of them.
        divides_heads = all(heads % tp == 0 or tp % heads == 0 for heads in kv_heads)
        return divides_heads and all(width % tp == 0 for width in widths)

    return tuple(tp for tp in sizes if divides_all(tp))


def sizes_to_measure(
    recipe: Recipe, ranks: int, only: Sequence[str] = (), tp_option: str | None = None
) -> dict[str, tuple[int, ...]]:
    """Return by unit the tensor-parallel sizes that the recipe allows on `ranks` local ranks.

    Args:
        recipe: what will be planned.
        ranks: ranks of this machine.
        only: names of units; all by default.
        tp_option: the sizes to measure, like `1,2`; all that are possible by default.

    Raises:
        UserError: a unit does not exist, or no size in `tp_option` is possible.
    """
    hardware = preset(recipe.cluster.hardware) if recipe.cluster.hardware != "auto" else None
    ranks_per_node = recipe.cluster.ranks_per_node or (hardware.ranks_per_node if hardware else ranks)
    model = build_model_shape(recipe)
    choices = unit_choices(recipe, model, ranks_per_node)
    unknown = [unit for unit in only if unit not in choices]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such unit; allowed: {', '.join(choices)}")
    possible = {
        unit: tuple(tp for tp in choice.tp if tp <= ranks)
        for unit, choice in choices.items()
        if not only or unit in only
    }
    return possible if tp_option is None else _restrict(possible, tp_option, ranks)


def _restrict(possible: dict[str, tuple[int, ...]], tp_option: str, ranks: int) -> dict[str, tuple[int, ...]]:
    """Keep the sizes that `--tp` names."""
    try:
        sizes = {int(part) for part in tp_option.split(",")}
    except ValueError:
        raise UserError(f"--tp {tp_option}: whole numbers with commas are needed, like 1,2") from None
    chosen = {unit: tuple(sorted(sizes & set(of_unit))) for unit, of_unit in possible.items()}
    if not any(chosen.values()):
        allowed = "; ".join(f"{unit}: {', '.join(map(str, of_unit))}" for unit, of_unit in possible.items())
        raise UserError(f"--tp {tp_option}: not possible on {ranks} ranks; allowed: {allowed}")
    return chosen
