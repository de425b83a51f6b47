"""What context parallelism (`parallel.llm.cp`) demands of the model, of the placement and of tensor parallelism."""

from collections.abc import Iterator
from typing import Literal

from mmtrain.recipe.raw_tree import Problem
from mmtrain.recipe.settings.schema import Recipe

_PATH = ("parallel", "llm")


def check_context_parallelism(recipe: Recipe) -> Iterator[Problem]:
    """Ranks that share sequences suit the placement, the generator, and the heads or masks of the LLM."""
    degrees = recipe.parallel.llm
    for name in ("cp_method", "cp_split"):
        if degrees.cp == 1 and getattr(degrees, name) != "auto":
            text = (
                f"found {getattr(degrees, name)} with parallel.llm.cp 1; it says how ranks share sequences, cp above 1"
            )
            yield Problem((*_PATH, name), text)
    if degrees.cp is None or degrees.cp == 1:
        return
    placement = recipe.parallel.placement
    if placement == "colocated":
        text = f"found {degrees.cp}, allowed in parallel.placement colocated: 1 (or use another placement)"
        yield Problem((*_PATH, "cp"), text)
    if recipe.model.generator is not None:
        text = f"found {degrees.cp}, allowed with model.generator: 1 (the queries of an image lie on one rank)"
        yield Problem((*_PATH, "cp"), text)
    tp = degrees.tp or 1
    ring_problem, ulysses_problem = _ring_problem(recipe), _ulysses_problem(recipe, degrees.cp, tp)
    if degrees.cp_method == "ring" and ring_problem:
        yield Problem((*_PATH, "cp_method"), f"found ring, allowed: ulysses or auto ({ring_problem})")
    elif ulysses_problem and (ring_problem or degrees.cp_method == "ulysses"):
        ring = f"cp_method ring is not possible: {ring_problem}" if ring_problem else "any with cp_method ring"
        yield Problem((*_PATH, "cp"), f"{ulysses_problem}; allowed: {_ulysses_degrees(recipe, tp)} ({ring})")


def context_methods(recipe: Recipe, tp: int, cp: int) -> tuple[Literal["ulysses", "ring"], ...]:
    """Return by which methods `cp` ranks may share the LLM's sequences beside `tp`-way tensor parallelism."""
    is_ring_possible = _ring_problem(recipe) is None
    if _ulysses_problem(recipe, cp, tp) is not None:
        return ("ring",) if is_ring_possible else ()
    return ("ulysses", "ring") if is_ring_possible else ("ulysses",)


def _ring_problem(recipe: Recipe) -> str | None:
    """Return why keys and values cannot go round, or None."""
    llm = recipe.model.llm
    if llm.window is not None:
        return f"model.llm.window {llm.window}: blocks with a sliding window"
    if llm.image_attention != "causal":
        return f"model.llm.image_attention {llm.image_attention}: tokens of an image see later ones"
    if llm.delta_net is not None:
        return "model.llm.delta_net: the state of a head passes from token to token"
    return None


def _ulysses_degrees(recipe: Recipe, tp: int) -> str:
    """Return the degrees by which ranks can share the heads of a rank, as text."""
    degrees = range(1, recipe.model.llm.heads // tp + 1)
    return ", ".join(str(cp) for cp in degrees if _ulysses_problem(recipe, cp, tp) is None)


def _ulysses_problem(recipe: Recipe, cp: int, tp: int) -> str | None:
    """Return why the heads of a rank cannot be divided over `cp` ranks, or None."""
    llm = recipe.model.llm
    if llm.heads % tp:
        return None  # another check says so
    if llm.image_attention == "bidirectional_in_windows":
        return f"{cp} ranks cannot share sequences beside model.llm.image_attention bidirectional_in_windows yet"
    heads = llm.heads // tp
    if heads % cp:
        return f"{cp} does not divide the {heads} heads of a rank (model.llm.heads {llm.heads}, parallel.llm.tp {tp})"
    for kv_heads in llm.all_kv_heads:
        local_kv_heads = max(kv_heads // tp, 1)
        if local_kv_heads % cp and cp % local_kv_heads:
            return f"{cp} neither divides nor is a multiple of the {local_kv_heads} key and value heads of a rank"
    if llm.delta_net is None or llm.delta_net.key_heads % tp:
        return None
    key_heads = llm.delta_net.key_heads // tp
    if key_heads % cp:
        of_model = f"model.llm.delta_net.key_heads {llm.delta_net.key_heads}, parallel.llm.tp {tp}"
        return f"{cp} does not divide the {key_heads} key heads of a rank's gated DeltaNets ({of_model})"
    return None
