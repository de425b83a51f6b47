"""`scripts/trainer_settings.py` reads names, types and allowed values from source that it never imports."""

import zipfile
from pathlib import Path

import pytest

from mmtrain.planning.emit.accepted_settings import accepted_settings
from mmtrain.planning.emit.emit_plan import TRAINERS
from scripts.trainer_settings import (
    SourceTree,
    WheelFiles,
    argument_settings,
    emitted_names,
    kind_of,
    known_parts,
    unknown_names,
)

SOURCE = """
import nowhere

class Base:
    inherited: int = 1

class Sizes(Base):
    hidden_size: int = field(default=0, metadata={"argparse_meta": {"default": None}})
    epsilon: float = field(default=1e-5, metadata={"argparse_meta": {"arg_names": ["--norm-epsilon"]}})
    use_bias: bool = True
    fast: bool = False
    kind: Literal["a", "b"] | None = None
    timers: Callable = None

def add_arguments(parser):
    exclude = ["timers"]
    group = ArgumentGroupFactory(Sizes, exclude=exclude).build_group(parser)
    group.add_argument("--layout", type=str, default=None)
    group.add_argument("--modules", nargs="+", type=str)
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--scale", choices=["x", "y"])
    group.add_argument("--window", type=tuple_type)

def encoder(config):
    if config.kind == "clip":
        config.num_layers = 24
        config.activation = gelu
    elif config.kind == "siglip":
        config.num_layers = 27
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    wheel = tmp_path / "trainer-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("trainer/arguments.py", SOURCE)
    return SourceTree(WheelFiles(wheel))


def test_arguments_are_read_from_calls_and_from_dataclasses(tree: SourceTree) -> None:
    assert argument_settings(tree, "trainer/arguments.py") == {
        "--inherited": "int",
        "--hidden-size": "int",
        "--norm-epsilon": "float",
        "--no-use-bias": "flag",
        "--disable-use-bias": "flag",
        "--fast": "flag",
        "--kind": ["a", "b"],
        "--layout": "str",
        "--modules": "str...",
        "--swiglu": "flag",
        "--scale": ["x", "y"],
        "--window": "any",
    }


def test_fields_that_may_be_none_say_so(tree: SourceTree) -> None:
    fields = {name: kind_of(field.annotation) for name, field in tree.fields("Sizes").items()}
    assert fields["kind"] == ["a", "b", None]
    assert fields["inherited"] == "int"
    assert fields["timers"] == "any"


def test_parts_are_known_by_their_sizes(tree: SourceTree) -> None:
    parts = known_parts(tree, "trainer/arguments.py", "encoder")
    assert parts == {"clip": {"num_layers": 24}, "siglip": {"num_layers": 27}}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_name_that_an_emitter_states_is_accepted(trainer: str) -> None:
    assert len(emitted_names(trainer)) > 10
    assert unknown_names(trainer, accepted_settings(trainer).kinds) == []
