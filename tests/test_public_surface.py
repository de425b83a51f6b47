"""What the rooms show each other: explicit, importable, committed; and planning starts without torch.

When a change of the surface is meant, `python -m tests.test_public_surface` rewrites the committed list.
"""

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mmtrain

COMMITTED = Path(__file__).with_name("public_surface.json")
ROOMS = sorted(module.name for module in pkgutil.iter_modules(mmtrain.__path__) if module.ispkg)
WITHOUT_TORCH = [
    *("api", "balance", "checkpoint", "cli", "costs", "data", "families", "planning", "program", "recipe", "report"),
    "weights",
]


def surface() -> dict[str, list[str]]:
    """Return what each room exports, and under `mmtrain` what its users call, with all arguments."""
    rooms = {room: list(importlib.import_module(f"mmtrain.{room}").__all__) for room in ROOMS}
    return {"mmtrain": [described(name) for name in mmtrain.__all__], **rooms}


def described(name: str) -> str:
    """Return a name of `import mmtrain`; of a function with its arguments, of a class with what it shows."""
    value = getattr(mmtrain, name)
    if inspect.isfunction(value):
        signature = inspect.signature(value)
        arguments = [argument.replace(annotation=argument.empty) for argument in signature.parameters.values()]
        return f"{name}{signature.replace(parameters=arguments, return_annotation=signature.empty)}"
    if inspect.isclass(value) and name != "Recipe":  # docs/recipe.schema.json has the settings
        members = {*vars(value), *getattr(value, "__dataclass_fields__", ())}
        return f"{name}: {', '.join(sorted(member for member in members if not member.startswith('_')))}"
    return name


def test_the_surface_is_the_committed_one() -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert surface() == committed, "if this is meant: python -m tests.test_public_surface"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_explains_itself_and_exports_what_exists(room: str) -> None:
    package = importlib.import_module(f"mmtrain.{room}")
    assert package.__doc__
    assert len(package.__doc__) > 20
    assert len(set(package.__all__)) == len(package.__all__)
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_planning_loads_no_torch() -> None:
    """Import every module of these rooms; import-linter cannot tell a lazy import from an eager one."""
    packages = [importlib.import_module(f"mmtrain.{room}") for room in (*WITHOUT_TORCH, "models.shapes")]
    modules = ["mmtrain.models"]
    for package in packages:
        modules += [package.__name__]
        modules += [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    COMMITTED.write_text(json.dumps(surface(), indent=2) + "\n", encoding="utf-8")
