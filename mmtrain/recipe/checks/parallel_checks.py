"""What the fixed parallel degrees of units demand of the model, of the batch and of each other.

What the planner may choose (None) fits by construction, so only degrees that the recipe fixes are checked.
"""

from collections.abc import Iterator
from itertools import product
from math import prod
from operator import itemgetter

from mmtrain.recipe.raw_tree import Problem
from mmtrain.recipe.settings.encoder_settings import EncoderSettings
from mmtrain.recipe.settings.llm_settings import LlmSettings
from mmtrain.recipe.settings.modalities import MODALITIES, dotted_unit, other_units, unit_path
from mmtrain.recipe.settings.parallel_settings import UnitParallel
from mmtrain.recipe.settings.schema import Recipe

NUM_END_LAYERS = 2  # layers of a unit besides its blocks: embedding, and head or projector


def check_parallel_encoders(recipe: Recipe) -> Iterator[Problem]:
    """Every entry of `parallel.encoders` belongs to an encoder of `model.encoders`."""
    named = recipe.model.encoders
    for name in recipe.parallel.encoders:
        if name in named:
            continue
        if name in MODALITIES:
            allowed = f"degrees of the short form `model.{name}` stand in parallel.{name}"
        else:
            allowed = f"allowed: {', '.join(named)}" if named else "model.encoders is empty"
        yield Problem(("parallel", "encoders", name), f"model.encoders has no {name}; {allowed}")


def check_encoder_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """Tensor- and pipeline-parallel degrees of an encoder fit its heads, widths and layers."""
    for name, encoder in recipe.model.all_encoders.items():
        degrees = recipe.parallel.of(name)
        of_projector = {"projector.heads": encoder.projector.heads} if encoder.projector.heads else {}
        if encoder.projector.kind == "merger":
            of_projector["projector.ffn"] = encoder.projector.ffn or recipe.model.llm.hidden
        yield from check_tp(name, degrees, heads=encoder.heads, ffn=encoder.ffn, **of_projector)
        yield from _check_pp(name, degrees, encoder)


def check_llm_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """Tensor- and pipeline-parallel degrees of the LLM fit its heads, widths and layers."""
    llm = recipe.model.llm
    tp = recipe.parallel.llm.tp or 1
    kv_heads = llm.kv_heads or llm.heads
    kv_outputs = 2 * kv_heads * (llm.head_dim or llm.hidden // llm.heads)
    unfit = [number for number in llm.all_kv_heads if number % tp and tp % number]
    if unfit:
        key = "kv_heads" if unfit == [kv_heads] else "full_attention.kv_heads"
        text = f"{tp} neither divides nor is a multiple of model.llm.{key} {unfit[0]}"
        yield Problem(("parallel", "llm", "tp"), text)
    elif kv_outputs % tp:
        text = f"{tp} does not divide the {kv_outputs} outputs of the key and value projections (kv_heads {kv_heads})"
        yield Problem(("parallel", "llm", "tp"), text)
    else:
        widths = {"ffn": llm.ffn} if llm.moe is None or llm.moe.dense_blocks else {}
        widths |= {} if llm.moe is None else {"moe.ffn": llm.moe.ffn}
        widths |= {} if llm.moe is None or llm.moe.shared_ffn is None else {"moe.shared_ffn": llm.moe.shared_ffn}
        if llm.shared_kv is not None and llm.shared_kv.ffn is not None:
            widths["shared_kv.ffn"] = llm.shared_kv.ffn
        widths |= {} if llm.delta_net is None else {"delta_net.key_heads": llm.delta_net.key_heads}
        yield from check_tp("llm", recipe.parallel.llm, heads=llm.heads, **widths)
    yield from _check_pp("llm", recipe.parallel.llm, llm)


def check_expert_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The expert-parallel degree divides the experts, and replicas if these are fixed, and suits fixed shards."""
    degrees, moe, path = recipe.parallel.llm, recipe.model.llm.moe, ("parallel", "llm", "ep")
    ep = degrees.ep
    if ep is None:
        return
    if moe is None:
        yield Problem(path, f"found {ep}, but model.llm has no experts (`moe`); remove it")
        return
    if moe.experts % ep:
        yield Problem(path, f"{ep} does not divide the {moe.experts} experts of model.llm.moe; use a divisor of them")
    shard = recipe.parallel.shard
    if isinstance(shard, int) and shard % ep and ep % shard:
        text = (
            f"{ep} neither divides nor is a multiple of parallel.shard {shard}: one copy of the weights, or several, "
        )
        yield Problem(path, text + "hold all experts; use a divisor or a multiple of it")
    if degrees.dp is not None:
        replicas, of = degrees.dp * (degrees.cp or 1), "dp x cp" if degrees.cp else "dp"
        if replicas % ep:
            yield Problem(path, f"{ep} does not divide parallel.llm's {of}, {replicas}: as many replicas hold experts")


def check_other_data_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The replicas of encoders and of the generator share the global batch evenly."""
    for name in other_units(recipe.model):
        yield from _check_dp(name, recipe.parallel.of(name), recipe)


def check_llm_data_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The replicas of the LLM share the global batch evenly."""
    yield from _check_dp("llm", recipe.parallel.llm, recipe)


def check_num_microbatches(recipe: Recipe) -> Iterator[Problem]:
    """The LLM's microbatches add up to the global batch; those of other units divide them or are a multiple."""
    llm, batch = recipe.parallel.llm, recipe.train.global_batch
    if not isinstance(batch, int):  # the number of groups that it makes is a multiple of what the recipe fixes
        return
    path = ("parallel", "llm", "num_microbatches")
    num_llm = llm.num_microbatches
    if num_llm is None:
        if llm.dp is not None and batch % llm.dp == 0:
            num_llm = batch // llm.dp
    elif batch % num_llm:
        yield Problem(path, f"{num_llm} does not divide train.global_batch {batch}")
    elif llm.dp is not None and num_llm * llm.dp != batch:
        yield Problem(path, f"{num_llm} times parallel.llm.dp {llm.dp} is not train.global_batch {batch}")
    for name in other_units(recipe.model):
        num = recipe.parallel.of(name).num_microbatches
        if num is not None and num_llm is not None and num % num_llm and num_llm % num:
            text = f"{num} neither divides nor is a multiple of the LLM's {num_llm} microbatches (global_batch / dp)"
            yield Problem(("parallel", *unit_path(name), "num_microbatches"), text)


def check_placement(recipe: Recipe) -> Iterator[Problem]:
    """The placement suits the model's units and their fixed parallel degrees."""
    placement = recipe.parallel.placement
    path = ("parallel", "placement")
    defaults = {"shard": "auto", "zero": 3, "dispatch": "auto", "exchange": "all_to_all", "schedule": "auto"}
    for name, default in defaults.items():
        value = getattr(recipe.parallel, name)
        if value != default and placement != "replicated":
            text = f"found {value} with placement {placement}; it is used in parallel.placement: replicated"
            yield Problem(("parallel", name), text)
    yield from _check_balance_policies(recipe)
    if placement in ("disaggregated", "colocated") and not _present_other_units(recipe):
        yield Problem(
            path, f"found {placement}, which needs a second unit, but the model has only the LLM; use unified"
        )
    elif placement == "colocated":
        yield from _check_colocated(recipe)
    elif placement == "replicated":
        yield from _check_replicated(recipe)
    elif placement == "unified":
        for name in other_units(recipe.model):
            yield from _check_one_pipeline(name, recipe)


def _check_one_pipeline(name: str, recipe: Recipe) -> Iterator[Problem]:
    """Another unit lies on the LLM's ranks; those of a TP group, or that share sequences, may hold several replicas."""
    degrees, llm = recipe.parallel.of(name), recipe.parallel.llm
    path = ("parallel", *unit_path(name))
    replicas_per_tp_group = 1
    if degrees.tp is not None and llm.tp is not None and degrees.tp != llm.tp:
        if name not in recipe.model.all_encoders:
            text = f"{degrees.tp} differs from parallel.llm.tp {llm.tp}, which a generator has too in `unified`"
            yield Problem((*path, "tp"), text)
        elif llm.tp % degrees.tp:
            text = f"{degrees.tp} does not divide parallel.llm.tp {llm.tp}; in `unified` an encoder has it or a divisor"
            yield Problem((*path, "tp"), text)
        else:
            replicas_per_tp_group = llm.tp // degrees.tp
    factors = {"cp": llm.cp or 1, "tp over the encoder's": replicas_per_tp_group}
    if degrees.dp is not None and llm.dp is not None and degrees.dp != llm.dp * prod(factors.values()):
        times = "".join(f" times {factor} {size}" for factor, size in factors.items() if size > 1)
        text = f"{degrees.dp} differs from parallel.llm.dp {llm.dp}{times}, but `unified` puts all units on one mesh"
        yield Problem((*path, "dp"), text)
    if degrees.vpp is not None and llm.vpp is not None and degrees.vpp != llm.vpp:
        text = f"{degrees.vpp} differs from parallel.llm.vpp {llm.vpp}, but `unified` puts all units on one mesh"
        yield Problem((*path, "vpp"), text)


def _check_balance_policies(recipe: Recipe) -> Iterator[Problem]:
    """A policy decides about samples or items that ranks exchange."""
    parallel = recipe.parallel
    for unit in parallel.balance_as_padded():
        policy = parallel.of(unit).balance_policy
        path = ("parallel", *unit_path(unit), "balance_policy")
        if parallel.placement != "replicated":
            text = f"found {policy} with placement {parallel.placement}; it is used in parallel.placement: replicated"
            yield Problem(path, text)
        elif unit != "llm" and parallel.dispatch not in ("all", "auto"):
            text = f"found {policy} with parallel.dispatch {parallel.dispatch}, where items stay with their samples; "
            yield Problem(path, text + "use dispatch all or auto")
        elif unit == "llm" and parallel.dispatch == "none":
            text = (
                f"found {policy} with parallel.dispatch none, where samples stay where they are; use another dispatch"
            )
            yield Problem(path, text)
        elif unit == "llm" and (recipe.data.grouping == "matched" or not recipe.data.reorder):
            text = f"found {policy}, but ranks exchange samples only with data.reorder: true and another data.grouping "
            yield Problem(path, text + "than matched (use random, length, device or isf)")


def _check_replicated(recipe: Recipe) -> Iterator[Problem]:
    """Every TP group runs all of every unit, shards divide the groups, and what runs first exists."""
    if recipe.parallel.schedule == "encoder_first" and not recipe.model.all_encoders:
        yield Problem(("parallel", "schedule"), "found encoder_first, but the model has no encoder; use 1f1b or auto")
    exchange, dispatch = recipe.parallel.exchange, recipe.parallel.dispatch
    if exchange != "all_to_all" and dispatch not in ("all", "auto"):
        text = f"found {exchange} with parallel.dispatch {dispatch}, which exchanges nothing; use dispatch all or auto"
        yield Problem(("parallel", "exchange"), text)
    units = ("llm", *_present_other_units(recipe))
    for name, degree in product(units, ("pp", "vpp")):
        fixed = getattr(recipe.parallel.of(name), degree)
        if fixed is not None and fixed > 1:
            text = f"found {fixed}, allowed: 1 (in `replicated` every rank runs all layers; `unified` divides them)"
            yield Problem(("parallel", *unit_path(name), degree), text)
    fixed_tp = {name: tp for name in units if (tp := recipe.parallel.of(name).tp) is not None}
    for name, tp in fixed_tp.items():
        if tp != (common := next(iter(fixed_tp.values()))):
            first = dotted_unit(next(iter(fixed_tp)))
            text = (
                f"{tp} differs from parallel.{first}.tp {common}; in `replicated` a TP group runs every unit, so all "
                f"have one tp: set both to {common} or to {tp}, leave one out, or let parallel.placement be unified"
            )
            yield Problem(("parallel", *unit_path(name), "tp"), text)
    yield from _check_shard(recipe, next(iter(fixed_tp.values()), 1))


def _check_shard(recipe: Recipe, tp: int) -> Iterator[Problem]:
    """Shards divide the ranks at one place of the TP groups, and whole weights have none."""
    shard, ranks = recipe.parallel.shard, recipe.cluster.ranks
    if recipe.parallel.zero == 1 and shard != "auto":
        text = f"found {shard} with parallel.zero 1, which keeps weights whole on every rank; leave out one of the two"
        yield Problem(("parallel", "shard"), text)
    if shard == 1 and recipe.train.grad_reduce == "bf16":
        text = "found bf16 with parallel.shard 1, whose copies add up gradients in fp32; use fp32, another "
        text += "parallel.shard, or parallel.zero: 1, which keeps weights whole as well"
        yield Problem(("train", "grad_reduce"), text)
    if isinstance(shard, int) and ranks is not None and ranks % (shard * tp):
        by_tp = f" by tp {tp}" if tp > 1 else ""
        text = f"{shard} does not divide cluster.ranks {ranks}{by_tp}; use a divisor, or `all`"
        yield Problem(("parallel", "shard"), text)


def _check_colocated(recipe: Recipe) -> Iterator[Problem]:
    """Encoders and a generator run on a part of the LLM's ranks, each replica in one block of them."""
    for name, degree in product(other_units(recipe.model), ("tp", "pp")):
        of_unit, llm = getattr(recipe.parallel.of(name), degree), getattr(recipe.parallel.llm, degree)
        if of_unit is not None and llm is not None and llm % of_unit:
            text = f"{of_unit} does not divide parallel.llm.{degree} {llm}; a colocated unit uses a part of its ranks"
            yield Problem(("parallel", *unit_path(name), degree), text)
    for name in other_units(recipe.model):
        vpp = recipe.parallel.of(name).vpp or 1
        if vpp > 1:
            text = f"found {vpp}, allowed: 1 (a colocated unit has no model chunks: its layers fill idle times)"
            yield Problem(("parallel", *unit_path(name), "vpp"), text)


def check_model_chunks(recipe: Recipe) -> Iterator[Problem]:
    """A unit has a layer for each chunk of each pipeline rank; in a unified pipeline all units together have them."""
    if recipe.parallel.placement not in ("disaggregated", "colocated") and _present_other_units(recipe):
        return
    units = {"llm": recipe.model.llm, **recipe.model.all_encoders}
    for name, unit in units.items():
        degrees = recipe.parallel.of(name)
        num_chunks = (degrees.pp or 1) * (degrees.vpp or 1)
        num_layers = unit.layers + NUM_END_LAYERS
        if degrees.vpp is not None and num_chunks > num_layers:
            ranks = f" on each of parallel.{dotted_unit(name)}.pp {degrees.pp} ranks" if degrees.pp else ""
            text = f"{degrees.vpp} chunks{ranks} are more than the unit's {num_layers} layers"
            yield Problem(("parallel", *unit_path(name), "vpp"), text)


def check_cluster_size(recipe: Recipe) -> Iterator[Problem]:
    """The fixed meshes fit on the cluster."""
    parallel = recipe.parallel
    limits = {"cluster.ranks": recipe.cluster.ranks, "parallel.max_gpus": parallel.max_gpus}
    known_limits = {name: limit for name, limit in limits.items() if limit is not None}
    if not known_limits:
        return
    limit, available = min(known_limits.items(), key=itemgetter(1))
    sizes = {}
    for name in ("llm", *_present_other_units(recipe)):
        degrees = recipe.parallel.of(name)
        cp = (recipe.parallel.llm.cp or 1) if name == "llm" else 1
        sizes[name] = (degrees.tp or 1) * cp * (degrees.pp or 1) * (degrees.dp or 1)
        if sizes[name] > available:
            text = f"tp x {'cp x ' if cp > 1 else ''}pp x dp needs {sizes[name]} ranks, {limit} is {available}"
            yield Problem(("parallel", *unit_path(name)), text)
    if parallel.placement == "disaggregated" and max(sizes.values()) <= available < sum(sizes.values()):
        needs = " + ".join(f"{size} ({name})" for name, size in sizes.items())
        text = f"disaggregated units need {needs} ranks, {limit} is {available}; `unified` units share ranks"
        yield Problem(("parallel", "placement"), text)


def check_tp(unit: str, degrees: UnitParallel, **widths: int) -> Iterator[Problem]:
    """The tensor-parallel degree divides the widths; keywords are names of settings of the unit."""
    path = dotted_unit(unit)
    if degrees.sp is True and degrees.tp == 1:
        text = f"sequence parallelism needs a tensor-parallel degree above 1, parallel.{path}.tp is 1; set sp to false"
        yield Problem(("parallel", *unit_path(unit), "sp"), text)
    if degrees.tp_overlap is True and degrees.tp == 1:
        text = f"chunks hide the communication of tensor parallelism, and parallel.{path}.tp is 1; set it to false"
        yield Problem(("parallel", *unit_path(unit), "tp_overlap"), text)
    uneven = [f"model.{path}.{name} {width}" for name, width in widths.items() if degrees.tp and width % degrees.tp]
    if uneven:
        yield Problem(("parallel", *unit_path(unit), "tp"), f"{degrees.tp} does not divide {' or '.join(uneven)}")


def _check_pp(unit: str, degrees: UnitParallel, settings: EncoderSettings | LlmSettings) -> Iterator[Problem]:
    num_layers = settings.layers + NUM_END_LAYERS
    if degrees.pp is not None and degrees.pp > num_layers:
        layers = f"model.{dotted_unit(unit)}.layers {settings.layers} and the {NUM_END_LAYERS} at its ends"
        text = f"{degrees.pp} is more than the unit's {num_layers} layers ({layers})"
        yield Problem(("parallel", *unit_path(unit), "pp"), text)


def _check_dp(unit: str, degrees: UnitParallel, recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.train.global_batch
    if degrees.dp is not None and isinstance(batch, int) and batch % degrees.dp:
        text = f"{degrees.dp} does not divide train.global_batch {batch}"
        yield Problem(("parallel", *unit_path(unit), "dp"), text)


def _present_other_units(recipe: Recipe) -> list[str]:
    """Return the model's units besides the LLM."""
    return [*recipe.model.all_encoders, *(("generator",) if recipe.model.generator is not None else ())]
