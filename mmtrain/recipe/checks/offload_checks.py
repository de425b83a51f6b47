"""What keeping activations in host memory (`parallel.UNIT.offload`) demands of the other settings of a unit."""

from collections.abc import Iterator

from mmtrain.recipe.raw_tree import Problem
from mmtrain.recipe.settings.modalities import unit_path
from mmtrain.recipe.settings.schema import Recipe


def check_offload(recipe: Recipe) -> Iterator[Problem]:
    """Something of the unit can go to host memory."""
    for name in (*recipe.model.all_encoders, "llm"):
        degrees = recipe.parallel.of(name)
        if degrees.offload in ("inputs", "all") and degrees.recompute == "none":
            text = (
                f"found {degrees.offload} with recompute none, which keeps all activations on the device; allowed: "
                "none, or recompute auto (as few blocks as memory demands) or all"
            )
            yield Problem(("parallel", *unit_path(name), "offload"), text)
    if recipe.model.generator is not None and recipe.parallel.generator.offload in ("inputs", "all"):
        text = f"found {recipe.parallel.generator.offload}, allowed: none or auto (layers of a generator keep theirs)"
        yield Problem(("parallel", "generator", "offload"), text)
