"""Options of NCCL's communicators, on builds of torch without NCCL: by the signatures that every build ships."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmtrain.runtime.execution import process_groups

STUBS = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"


def _declared_class(scope: ast.Module | ast.ClassDef, name: str) -> ast.ClassDef:
    return next(node for node in scope.body if isinstance(node, ast.ClassDef) and node.name == name)


def _fields(declared: ast.ClassDef) -> tuple[str, ...]:
    fields = [node.target for node in declared.body if isinstance(node, ast.AnnAssign)]
    return tuple(target.id for target in fields if isinstance(target, ast.Name))


def test_messages_get_few_thread_blocks_and_start_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = _declared_class(ast.parse(STUBS.read_text(encoding="utf-8")), "ProcessGroupNCCL")
    config_class = type("_Config", (), {"__slots__": _fields(_declared_class(nccl, "NCCLConfig"))})
    declared = _declared_class(nccl, "Options")
    create = next(node for node in declared.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert [argument.arg for argument in create.args.args] == ["self", "is_high_priority_stream"]
    assert "config" in _fields(declared)

    def options_of(is_high_priority_stream: bool = False) -> SimpleNamespace:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=config_class())

    stand_in = SimpleNamespace(Options=options_of)
    monkeypatch.setattr(torch._C._distributed_c10d, "ProcessGroupNCCL", stand_in, raising=False)
    options = process_groups._message_options()  # setting what the config does not have fails
    assert options.is_high_priority_stream
    assert 4 <= options.config.max_ctas <= 8
