"""mmtrain: plan and train multimodal LLMs, from one laptop core to thousands of GPUs.

`import mmtrain as mm` gives the functions that docs/python.md describes. Each is imported when it is first used, so
that the import itself stays light.
"""

from typing import TYPE_CHECKING, Any

from mmtrain.version import __version__

if TYPE_CHECKING:
    from mmtrain.api.opened_run import Run
    from mmtrain.api.python_api import (
        copy_recipe,
        evaluate,
        export,
        load_plan,
        load_recipe,
        open_run,
        plan,
        show_data,
        simulate,
        train,
        verify,
    )
    from mmtrain.api.shown_plan import ShownPlan as Plan
    from mmtrain.recipe import Recipe

__all__ = [
    "Plan",
    "Recipe",
    "Run",
    "__version__",
    "copy_recipe",
    "evaluate",
    "export",
    "load_plan",
    "load_recipe",
    "open_run",
    "plan",
    "show_data",
    "simulate",
    "train",
    "verify",
]

_FUNCTIONS = "mmtrain.api.python_api"
_CLASSES = {  # module and name in it
    "Plan": ("mmtrain.api.shown_plan", "ShownPlan"),
    "Recipe": ("mmtrain.recipe", "Recipe"),
    "Run": ("mmtrain.api.opened_run", "Run"),
}

if not TYPE_CHECKING:  # a checker would take every name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import importlib

        module, attribute = _CLASSES.get(name, (_FUNCTIONS, name))
        value = getattr(importlib.import_module(module), attribute)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
