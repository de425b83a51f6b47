"""What settings demand of each other. Each check reads like the rule it holds and names the setting to change."""

from collections.abc import Callable, Iterator
from itertools import product
from math import isqrt
from operator import itemgetter
from pathlib import Path

from mmtrain.recipe.model_settings import AudioSettings, LlmSettings, VisionSettings
from mmtrain.recipe.raw_tree import KeyPath, Problem
from mmtrain.recipe.schema import Recipe, UnitParallel, is_lengths_source

Check = Callable[[Recipe], Iterator[Problem]]
ENCODERS = ("vision", "audio")
OTHER_UNITS = (*ENCODERS, "generator")  # the LLM
NUM_END_LAYERS = 2  # layers beside the blocks: embedding and head, or an embedding of media and projector
LOG_MEL_FRAMES_PER_SECOND = 100  # of log-mel features


def check_encoder_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """An encoder's fixed tensor- and pipeline-parallel sizes fit its heads, widths and layers."""
    for name, encoder in _encoders(recipe).items():
        sizes: UnitParallel = getattr(recipe.parallel, name)
        yield from _tp(name, sizes, heads=encoder.heads, ffn=encoder.ffn)
        yield from _pp(name, sizes, encoder)


def check_llm_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The LLM's fixed tensor- and pipeline-parallel sizes fit its heads, widths and layers."""
    llm, tp = recipe.model.llm, recipe.parallel.llm.tp or 1
    kv_heads = llm.kv_heads or llm.heads
    outputs = 2 * kv_heads * (llm.head_dim or llm.hidden // llm.heads)
    if kv_heads % tp and tp % kv_heads:
        text = f"{tp} neither divides nor is a multiple of model.llm.kv_heads {kv_heads}"
        yield Problem(("parallel", "llm", "tp"), text)
    elif outputs % tp:
        text = f"{tp} does not divide the {outputs} outputs of the key and value projections (kv_heads {kv_heads})"
        yield Problem(("parallel", "llm", "tp"), text)
    else:
        yield from _tp("llm", recipe.parallel.llm, heads=llm.heads, ffn=llm.ffn)
    yield from _pp("llm", recipe.parallel.llm, llm)


def check_other_data_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The replicas of a unit beside the LLM share the global batch evenly."""
    for name in OTHER_UNITS:
        yield from _dp(name, getattr(recipe.parallel, name), recipe)


def check_llm_data_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """The LLM's replicas share the global batch evenly."""
    yield from _dp("llm", recipe.parallel.llm, recipe)


def check_num_microbatches(recipe: Recipe) -> Iterator[Problem]:
    """The LLM's microbatches make up the global batch; an encoder's merge or split them evenly."""
    llm, batch = recipe.parallel.llm, recipe.train.global_batch
    wanted, where = llm.num_microbatches, ("parallel", "llm", "num_microbatches")
    if wanted is None and llm.dp is not None and batch % llm.dp == 0:
        wanted = batch // llm.dp
    elif wanted is not None and batch % wanted:
        yield Problem(where, f"{wanted} does not divide train.global_batch {batch}")
    elif wanted is not None and llm.dp is not None and wanted * llm.dp != batch:
        yield Problem(where, f"{wanted} times parallel.llm.dp {llm.dp} is not train.global_batch {batch}")
    for name in OTHER_UNITS:
        own = getattr(recipe.parallel, name).num_microbatches
        if own is not None and wanted is not None and own % wanted and wanted % own:
            text = f"{own} neither divides the LLM's {wanted} microbatches (train.global_batch / dp) nor is a multiple"
            yield Problem(("parallel", name, "num_microbatches"), text)


def check_placement(recipe: Recipe) -> Iterator[Problem]:
    """The placement suits the units there are and the sizes fixed for them."""
    parallel = recipe.parallel
    if parallel.placement in ("disaggregated", "colocated") and not _others(recipe):
        lacks = "to be apart from" if parallel.placement == "disaggregated" else "to share its ranks with"
        text = f"found {parallel.placement}, but the model has no unit but the LLM: one has nothing {lacks}"
        yield Problem(("parallel", "placement"), text)
    elif parallel.placement == "colocated":
        yield from _colocated(recipe)
    elif parallel.placement == "unified":
        for name, size in product(OTHER_UNITS, ("tp", "dp", "vpp")):
            own, llm = getattr(getattr(parallel, name), size), getattr(parallel.llm, size)
            if own is not None and llm is not None and own != llm:
                text = f"{own} differs from parallel.llm.{size} {llm}, but `unified` puts all units on one mesh"
                yield Problem(("parallel", name, size), text)


def _colocated(recipe: Recipe) -> Iterator[Problem]:
    """Encoders lie on parts of the LLM's ranks, and go into its idle times."""
    parallel = recipe.parallel
    if recipe.model.generator is not None:
        text = "found colocated, allowed with model.generator: disaggregated, unified or auto"
        yield Problem(("parallel", "placement"), text)
    for name, size in product(ENCODERS, ("tp", "pp")):
        own, llm = getattr(getattr(parallel, name), size), getattr(parallel.llm, size)
        if own is not None and llm is not None and llm % own:
            text = f"{own} does not divide parallel.llm.{size} {llm}; a colocated encoder lies on a part of its ranks"
            yield Problem(("parallel", name, size), text)
    for name in ENCODERS:
        if (getattr(parallel, name).vpp or 1) > 1:
            text = f"found {getattr(parallel, name).vpp}, allowed: 1 (layers of a colocated encoder fill idle times)"
            yield Problem(("parallel", name, "vpp"), text)


def check_model_chunks(recipe: Recipe) -> Iterator[Problem]:
    """There is a layer for each chunk of each pipeline rank; a unified pipeline has those of all units."""
    if recipe.parallel.placement not in ("disaggregated", "colocated") and _others(recipe):
        return
    units = {"llm": recipe.model.llm, **_encoders(recipe)}
    for name, model in units.items():
        sizes: UnitParallel = getattr(recipe.parallel, name)
        stages, most = (sizes.pp or 1) * (sizes.vpp or 1), model.layers + NUM_END_LAYERS
        if sizes.vpp is not None and stages > most:
            ranks = f" on each of parallel.{name}.pp {sizes.pp} ranks" if sizes.pp else ""
            yield Problem(
                ("parallel", name, "vpp"), f"{sizes.vpp} chunks{ranks} are more than the unit's {most} layers"
            )


def check_cluster_size(recipe: Recipe) -> Iterator[Problem]:
    """The fixed meshes fit the cluster."""
    parallel = recipe.parallel
    limits = {"cluster.ranks": recipe.cluster.ranks, "parallel.max_gpus": parallel.max_gpus}
    limit, available = min(((k, v) for k, v in limits.items() if v is not None), key=itemgetter(1), default=("", None))
    if available is None:
        return
    units = {name: getattr(parallel, name) for name in ("llm", *_others(recipe))}
    sizes = {name: (unit.tp or 1) * (unit.pp or 1) * (unit.dp or 1) for name, unit in units.items()}
    for name, size in sizes.items():
        if size > available:
            yield Problem(("parallel", name), f"tp x pp x dp needs {size} ranks, {limit} is {available}")
    if parallel.placement == "disaggregated" and max(sizes.values()) <= available < sum(sizes.values()):
        needs = " + ".join(f"{size} ({name})" for name, size in sizes.items())
        text = f"disaggregated units need {needs} ranks, {limit} is {available}"
        yield Problem(("parallel", "placement"), text)


def check_rotary_width(recipe: Recipe) -> Iterator[Problem]:
    """Rotary positions turn pairs of features, so a head has an even width."""
    llm = recipe.model.llm
    width = llm.head_dim or llm.hidden // llm.heads
    if width % 2:
        where: KeyPath = ("model", "llm", "head_dim" if llm.head_dim else "heads")
        yield Problem(where, f"a head is {width} wide; allowed: an even width, for rotary positions")


def check_learning_rates(recipe: Recipe) -> Iterator[Problem]:
    """The schedule decays downwards."""
    optimizer = recipe.train.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            ("train", "optimizer", "min_lr"), f"{optimizer.min_lr:g} is above train.optimizer.lr {optimizer.lr:g}"
        )


def check_validation(recipe: Recipe) -> Iterator[Problem]:
    """Validation has something to validate on."""
    for key in ("validate_every", "evaluate_every"):
        every = getattr(recipe.train, key)
        if every and not recipe.data.validation:
            text = f"{every}, but data.validation is empty; add a source, or set 0"
            yield Problem(("train", key), text)


def check_sources(recipe: Recipe) -> Iterator[Problem]:
    """Samples are read with a tokenizer, and do not stand beside lengths without samples."""
    data = recipe.data
    stated = _stated(recipe)
    if any(stated) and not all(stated):
        text = "states lengths, other sources hold samples; allowed: one kind alone"
        yield Problem(("data", "sources", stated.index(True)), text)
    for i, source in enumerate(data.validation):
        if is_lengths_source(Path(source.path), source.format):
            yield Problem(("data", "validation", i), "states lengths, which is nothing to validate on")
    if data.tokenizer is None and not all(stated):
        text = "missing; allowed: the path of a `tokenizers` JSON file (only sources that state lengths need none)"
        yield Problem(("data", "tokenizer"), text)


def check_generator(recipe: Recipe) -> Iterator[Problem]:
    """A generator is planned for on stated lengths; a U-Net is whole on every rank that holds one."""
    model, sizes = recipe.model.generator, recipe.parallel.generator
    if model is None:
        return
    if not all(_stated(recipe)):
        text = "needs sources that state lengths, since no data file says what to generate; see docs/data.md"
        yield Problem(("model", "generator"), text)
    if sizes.sp is True:
        text = "found true, allowed: false or auto (the tokens of a generator are not shared out)"
        yield Problem(("parallel", "generator", "sp"), text)
    if model.kind == "dit":
        yield from _tp("generator", sizes, heads=model.heads[0])
        most = model.layers + NUM_END_LAYERS + 1  # a projector of the context, and both ends
        if sizes.pp is not None and sizes.pp > most:
            yield Problem(("parallel", "generator", "pp"), f"{sizes.pp} is more than the unit's {most} layers")
        return
    for size in ("tp", "pp", "vpp"):
        value = getattr(sizes, size)
        if value not in (None, 1):
            text = f"found {value}, allowed: 1 (skips join the ends of a U-Net; dp splits its work)"
            yield Problem(("parallel", "generator", size), text)


def check_sample_length(recipe: Recipe) -> Iterator[Problem]:
    """A sample that is let in fits a group."""
    data = recipe.data
    if data.max_sample_tokens is not None and data.max_sample_tokens > data.seq_len:
        where: KeyPath = ("data", "max_sample_tokens")
        yield Problem(where, f"{data.max_sample_tokens} is above data.seq_len {data.seq_len}: no group could hold it")


def check_budgets(recipe: Recipe) -> Iterator[Problem]:
    """Budgets are for encoders that the model has; the LLM's is the length of a group."""
    encoders = _encoders(recipe)
    for unit in recipe.data.budgets:
        if unit == "llm":
            yield Problem(("data", "budgets", unit), "the LLM's budget is data.seq_len; remove it here")
        elif unit not in encoders:
            allowed = f"allowed: {', '.join(encoders)}" if encoders else "the model has no encoder"
            yield Problem(("data", "budgets", unit), f"no encoder of this model is called {unit}; {allowed}")


def check_image_grid(recipe: Recipe) -> Iterator[Problem]:
    """Image sizes are whole numbers of merged patches, within the positions the encoder has."""
    vision, image = recipe.model.vision, recipe.data.image
    if vision is None or all(_stated(recipe)):
        return
    cell = vision.patch * vision.merge
    unit = f"model.vision.patch {vision.patch} x merge {vision.merge}"
    if image.scheme != "native":
        where, pixels = ("size", image.size) if image.scheme == "fixed" else ("tile", image.tile)
        side = pixels // vision.patch
        if pixels % cell:
            yield Problem(("data", "image", where), f"{pixels} is not a multiple of {cell} ({unit})")
    else:
        where, side = "max_pixels", isqrt(image.max_pixels) // vision.patch
        if image.min_pixels > image.max_pixels:
            text = f"{image.min_pixels} is above data.image.max_pixels {image.max_pixels}"
            yield Problem(("data", "image", "min_pixels"), text)
        if image.max_pixels < cell**2:
            yield Problem(("data", "image", where), f"{image.max_pixels} is less than one cell of {cell**2} ({unit})")
    if side > vision.max_side:
        text = f"a square image becomes {side} patches a side, model.vision.max_side is {vision.max_side}"
        yield Problem(("data", "image", where), text)


def check_image_length(recipe: Recipe) -> Iterator[Problem]:
    """The largest image leaves room for text in a group."""
    vision, image, seq_len = recipe.model.vision, recipe.data.image, recipe.data.seq_len
    if vision is None or all(_stated(recipe)):
        return
    most_tiles = image.max_tiles + (image.max_tiles > 1)  # with the one of the whole
    where, area = {
        "fixed": ("size", image.size**2),
        "native": ("max_pixels", image.max_pixels),
        "tiles": ("max_tiles", most_tiles * image.tile**2),
    }[image.scheme]
    tokens = area // (vision.patch * vision.merge) ** 2
    if tokens >= seq_len:
        text = f"one image becomes up to {tokens} LLM tokens, data.seq_len is {seq_len}; allowed: fewer than that"
        yield Problem(("data", "image", where), text)


def check_clip_length(recipe: Recipe) -> Iterator[Problem]:
    """The longest clip let in lies within the positions the encoder has."""
    audio, longest = recipe.model.audio, recipe.data.audio.max_seconds
    if audio is None or all(_stated(recipe)):
        return
    if longest * LOG_MEL_FRAMES_PER_SECOND > audio.max_frames:
        frames = longest * LOG_MEL_FRAMES_PER_SECOND
        text = f"{longest:g} s become {frames:g} frames, model.audio.max_frames is {audio.max_frames}"
        yield Problem(("data", "audio", "max_seconds"), text)
    elif audio.max_frames % (2 * audio.downsample):
        text = f"{audio.max_frames} is not a multiple of 2 x model.audio.downsample {audio.downsample}"
        yield Problem(("model", "audio", "max_frames"), text)


CHECKS: tuple[Check, ...] = (
    check_encoder_parallelism,
    check_llm_parallelism,
    check_other_data_parallelism,
    check_llm_data_parallelism,
    check_num_microbatches,
    check_placement,
    check_model_chunks,
    check_cluster_size,
    check_rotary_width,
    check_learning_rates,
    check_validation,
    check_sources,
    check_generator,
    check_sample_length,
    check_budgets,
    check_image_grid,
    check_image_length,
    check_clip_length,
)


def _stated(recipe: Recipe) -> list[bool]:
    """Of each source, whether it states lengths."""
    return [is_lengths_source(Path(source.path), source.format) for source in recipe.data.sources]


def _others(recipe: Recipe) -> list[str]:
    """The units that the model has beside the LLM."""
    return [name for name in OTHER_UNITS if getattr(recipe.model, name) is not None]


def _encoders(recipe: Recipe) -> dict[str, VisionSettings | AudioSettings]:
    """The encoders that the model has."""
    settings = {name: getattr(recipe.model, name) for name in ENCODERS}
    return {name: encoder for name, encoder in settings.items() if encoder is not None}


def _tp(unit: str, sizes: UnitParallel, **widths: int) -> Iterator[Problem]:
    if sizes.sp is True and sizes.tp == 1:
        text = f"needs more than one tensor-parallel rank, and parallel.{unit}.tp is 1; raise tp, or set sp to false"
        yield Problem(("parallel", unit, "sp"), text)
    uneven = [f"model.{unit}.{name} {width}" for name, width in widths.items() if sizes.tp and width % sizes.tp]
    if uneven:
        yield Problem(("parallel", unit, "tp"), f"{sizes.tp} does not divide {' or '.join(uneven)}")


def _pp(unit: str, sizes: UnitParallel, model: VisionSettings | AudioSettings | LlmSettings) -> Iterator[Problem]:
    most = model.layers + NUM_END_LAYERS
    if sizes.pp is not None and sizes.pp > most:
        text = f"{sizes.pp} is more than the unit's {most} layers (model.{unit}.layers {model.layers}, and both ends)"
        yield Problem(("parallel", unit, "pp"), text)


def _dp(unit: str, sizes: UnitParallel, recipe: Recipe) -> Iterator[Problem]:
    if sizes.dp is not None and recipe.train.global_batch % sizes.dp:
        text = f"{sizes.dp} does not divide train.global_batch {recipe.train.global_batch}"
        yield Problem(("parallel", unit, "dp"), text)
