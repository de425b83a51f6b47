"""The installed torch, Megatron-core and numpy have what mmtrain uses outside their stable interfaces."""

import ast
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from scripts import check_libraries
from scripts.check_libraries import ROOT, USED, Sources, installed, missing, used_of_megatron


def test_the_installed_libraries_have_every_name_that_is_used() -> None:
    known = ["torch gives gloo's threads no names: collectives on CPUs are slower"]  # before torch 2.13
    assert missing(installed()) == (known if Version(torch.__version__) < Version("2.13") else [])


def test_imports_and_keywords_of_megatron_are_found() -> None:
    used = used_of_megatron()
    config = used["megatron.core.transformer.transformer_config", "TransformerConfig"]
    assert {"kv_channels", "layernorm_zero_centered_gamma", "qk_layernorm"} <= config
    assert "init_state_fn" in used["megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"]


def test_private_modules_of_torch_are_listed() -> None:
    listed = {(module, name.partition(".")[0]) for module, name, _ in USED}
    for path in (ROOT / "mmtrain").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "from torch._" in text else ():
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch._"):
                assert {(node.module, alias.name) for alias in node.names} <= listed, path


def test_what_a_version_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("from .part import *\n")
    (tmp_path / "torch" / "part.py").write_text(
        "class Base:\n    def __init__(self, new): self.kept = new\n"
        "try:\n    class Other(Base):\n        field: int\nexcept ImportError:\n    pass\n"
        "def function(first, *, second=None): ...\n"
    )
    wanted = (
        ("torch", "Other", "kept new field gone"),
        ("torch", "function", "first second third"),
        ("torch.part", "Lost", ""),
        ("torch.away", "anything", ""),
        ("numpy.typing", "NDArray", ""),
    )
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.12.1+cu130'\n")
    monkeypatch.setattr(check_libraries, "USED", wanted)
    assert missing(Sources((tmp_path,)), "torch") == [
        "torch.Other has no gone",
        "torch.function has no third",
        "torch.part has no Lost",
        "torch.away has no anything",
        "torch gives gloo's threads no names: collectives on CPUs are slower",
    ]
    assert missing(Sources((tmp_path,)), "numpy") == ["numpy.typing has no NDArray"]
