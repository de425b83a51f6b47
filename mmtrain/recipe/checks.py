"""What settings demand of each other. Each check reads like the rule it holds and names the setting to change."""

from collections.abc import Callable, Iterator
from math import isqrt

from mmtrain.recipe.schema import LlmSettings, Recipe, UnitParallel, VisionSettings
from mmtrain.recipe.tree import Keys, Problem

Check = Callable[[Recipe], Iterator[Problem]]


def vision_splits(recipe: Recipe) -> Iterator[Problem]:
    """A vision unit's fixed tensor- and pipeline-parallel sizes fit its heads, widths and layers."""
    vision = recipe.model.vision
    if vision is not None:
        yield from _tp("vision", recipe.parallel.vision, heads=vision.heads, ffn=vision.ffn)
        yield from _pp("vision", recipe.parallel.vision, vision)


def llm_splits(recipe: Recipe) -> Iterator[Problem]:
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


def vision_replicas(recipe: Recipe) -> Iterator[Problem]:
    """The vision unit's replicas share the global batch evenly."""
    yield from _dp("vision", recipe.parallel.vision, recipe)


def llm_replicas(recipe: Recipe) -> Iterator[Problem]:
    """The LLM's replicas share the global batch evenly."""
    yield from _dp("llm", recipe.parallel.llm, recipe)


def placement(recipe: Recipe) -> Iterator[Problem]:
    """The placement suits the units there are and the sizes fixed for them."""
    parallel = recipe.parallel
    if parallel.placement == "disaggregated" and recipe.model.vision is None:
        text = "found disaggregated, but model.vision is left out: one unit has nothing to be apart from"
        yield Problem(("parallel", "placement"), text)
    if parallel.placement == "unified":
        for size in ("tp", "dp"):
            vision, llm = getattr(parallel.vision, size), getattr(parallel.llm, size)
            if vision is not None and llm is not None and vision != llm:
                text = f"{vision} differs from parallel.llm.{size} {llm}, but `unified` puts both units on one mesh"
                yield Problem(("parallel", "vision", size), text)


def ranks(recipe: Recipe) -> Iterator[Problem]:
    """The fixed meshes fit the cluster."""
    parallel, available = recipe.parallel, recipe.cluster.ranks
    if available is None:
        return
    units = {"llm": parallel.llm} | ({"vision": parallel.vision} if recipe.model.vision is not None else {})
    sizes = {name: (unit.tp or 1) * (unit.pp or 1) * (unit.dp or 1) for name, unit in units.items()}
    for name, size in sizes.items():
        if size > available:
            yield Problem(("parallel", name), f"tp x pp x dp needs {size} ranks, cluster.ranks is {available}")
    if parallel.placement == "disaggregated" and max(sizes.values()) <= available < sum(sizes.values()):
        needs = " + ".join(f"{size} ({name})" for name, size in sizes.items())
        text = f"disaggregated units need {needs} ranks, cluster.ranks is {available}"
        yield Problem(("parallel", "placement"), text)


def rotary(recipe: Recipe) -> Iterator[Problem]:
    """Rotary positions turn pairs of features, so a head has an even width."""
    llm = recipe.model.llm
    width = llm.head_dim or llm.hidden // llm.heads
    if width % 2:
        where: Keys = ("model", "llm", "head_dim" if llm.head_dim else "heads")
        yield Problem(where, f"a head is {width} wide; allowed: an even width, for rotary positions")


def learning_rates(recipe: Recipe) -> Iterator[Problem]:
    """The schedule decays downwards."""
    optimizer = recipe.train.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield Problem(
            ("train", "optimizer", "min_lr"), f"{optimizer.min_lr:g} is above train.optimizer.lr {optimizer.lr:g}"
        )


def validation(recipe: Recipe) -> Iterator[Problem]:
    """Validation has something to validate on."""
    if recipe.train.validate_every and not recipe.data.validation:
        text = f"{recipe.train.validate_every}, but data.validation is empty; add a source, or set 0"
        yield Problem(("train", "validate_every"), text)


def sample_length(recipe: Recipe) -> Iterator[Problem]:
    """A sample that is let in fits a group."""
    data = recipe.data
    if data.max_sample_tokens is not None and data.max_sample_tokens > data.seq_len:
        where: Keys = ("data", "max_sample_tokens")
        yield Problem(where, f"{data.max_sample_tokens} is above data.seq_len {data.seq_len}: no group could hold it")


def image_grid(recipe: Recipe) -> Iterator[Problem]:
    """Image sizes are whole numbers of merged patches, within the positions the encoder has."""
    vision, image = recipe.model.vision, recipe.data.image
    if vision is None:
        return
    cell = vision.patch * vision.merge
    unit = f"model.vision.patch {vision.patch} x merge {vision.merge}"
    if image.scheme == "fixed":
        where, side = "size", image.size // vision.patch
        if image.size % cell:
            yield Problem(("data", "image", "size"), f"{image.size} is not a multiple of {cell} ({unit})")
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


def image_length(recipe: Recipe) -> Iterator[Problem]:
    """The largest image leaves room for text in a group."""
    vision, image, seq_len = recipe.model.vision, recipe.data.image, recipe.data.seq_len
    if vision is None:
        return
    where, area = ("size", image.size**2) if image.scheme == "fixed" else ("max_pixels", image.max_pixels)
    tokens = area // (vision.patch * vision.merge) ** 2
    if tokens >= seq_len:
        text = f"one image becomes up to {tokens} LLM tokens, data.seq_len is {seq_len}; allowed: fewer than that"
        yield Problem(("data", "image", where), text)


CHECKS: tuple[Check, ...] = (
    vision_splits,
    llm_splits,
    vision_replicas,
    llm_replicas,
    placement,
    ranks,
    rotary,
    learning_rates,
    validation,
    sample_length,
    image_grid,
    image_length,
)


def _tp(unit: str, sizes: UnitParallel, **widths: int) -> Iterator[Problem]:
    uneven = [f"model.{unit}.{name} {width}" for name, width in widths.items() if sizes.tp and width % sizes.tp]
    if uneven:
        yield Problem(("parallel", unit, "tp"), f"{sizes.tp} does not divide {' or '.join(uneven)}")


def _pp(unit: str, sizes: UnitParallel, model: VisionSettings | LlmSettings) -> Iterator[Problem]:
    most = model.layers + 2  # embedding and head, or patch embedding and projector, are layers too
    if sizes.pp is not None and sizes.pp > most:
        text = f"{sizes.pp} is more than the unit's {most} layers (model.{unit}.layers {model.layers}, and both ends)"
        yield Problem(("parallel", unit, "pp"), text)


def _dp(unit: str, sizes: UnitParallel, recipe: Recipe) -> Iterator[Problem]:
    if sizes.dp is not None and recipe.train.global_batch % sizes.dp:
        text = f"{sizes.dp} does not divide train.global_batch {recipe.train.global_batch}"
        yield Problem(("parallel", unit, "dp"), text)
