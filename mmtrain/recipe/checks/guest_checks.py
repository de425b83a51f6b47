"""What a guest (`model.guest`) cannot have: all that reaches into the modules of a model."""

from collections.abc import Iterator
from typing import Any

from mmtrain.errors import UserError
from mmtrain.recipe.raw_tree import KeyPath, Problem
from mmtrain.recipe.settings.schema import Recipe

_DEGREES = ("tp", "pp", "cp", "ep")


def require_own_modules(recipe: Recipe, command: str) -> None:
    """Raise UserError for a command that needs modules of ours, and a recipe whose model is a guest."""
    if recipe.model.guest:
        raise UserError(
            f"{command} runs modules of mmtrain, and the model of this recipe is a guest (model.guest), whose modules "
            "are those of transformers; `mmtrain export` writes a folder that transformers opens"
        )


def check_guest(recipe: Recipe) -> Iterator[Problem]:
    """A guest is the whole model of a folder, runs in `replicated`, and no setting reaches into its modules."""
    model = recipe.model
    if not model.guest:
        return
    if model.hf is None:
        yield Problem(("model", "guest"), "found true without model.hf; name the folder of the guest there")
    for unit in (*model.all_encoders, *(("generator",) if model.generator is not None else ())):
        yield Problem(("model", "guest"), f"found true beside model.{unit}; a guest is the whole model, remove {unit}")
    placement = recipe.parallel.placement
    if placement != "replicated":
        text = f"found {placement}; a guest (model.guest) runs in one placement: replicated"
        yield Problem(("parallel", "placement"), text)
    for degree in _DEGREES:
        found = getattr(recipe.parallel.llm, degree)
        if found is not None and found > 1:
            text = f"found {found}; a guest (model.guest) is not split; allowed: 1. Families are (docs/guests.md)"
            yield Problem(("parallel", "llm", degree), text)
    for keys, found, allowed in _settings(recipe):
        if found != allowed:
            text = f"found {found!r}, which a guest (model.guest) cannot have; allowed: {allowed!r} (docs/guests.md)"
            yield Problem(keys, text)


def _settings(recipe: Recipe) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Yield settings that reach into modules: where, what the recipe says, and the only value for a guest."""
    train, parallel = recipe.train, recipe.parallel
    yield ("parallel", "dispatch"), "auto" if parallel.dispatch == "llm" else parallel.dispatch, "auto"
    yield ("parallel", "llm", "offload"), parallel.llm.offload, "none"
    again = parallel.llm.runs_activations_again
    yield ("parallel", "llm", "recompute_activation_function"), again, False
    yield ("model", "llm", "freeze"), recipe.model.llm.freeze, False
    yield ("train", "freeze"), train.freeze, ()
    yield ("train", "lora"), train.lora, None
    yield ("train", "optimizer", "kind"), train.optimizer.kind, "adamw"
    yield ("train", "optimizer", "layer_lr_decay"), train.optimizer.layer_lr_decay, 1.0
    yield ("train", "init_from"), train.init_from, None
    yield ("train", "evaluate_every"), train.evaluate_every, 0
