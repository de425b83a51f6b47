"""Data and a run without failures, made once for all tests of whole runs."""

from pathlib import Path

import pytest

from mmtrain.data.synthetic.demo import generate_demo
from tests.flow.runs import MANY_STEPS, REPLICATED, request_for, run_all


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate_demo(folder, seed=3, train=96, heldout=8)
    return folder


@pytest.fixture(scope="session")
def unbroken_replicated(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    request = request_for(data, run_dir, *REPLICATED)
    assert run_all(request, request) == ["", ""]
    return run_dir


@pytest.fixture(scope="session")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    request = request_for(data, run_dir)
    assert run_all(request, request) == ["", ""]
    return run_dir


@pytest.fixture(scope="session")
def unbroken_long(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "unbroken"
    request = request_for(data, run_dir, f"train.steps={MANY_STEPS}")
    assert run_all(request, request) == ["", ""]
    return run_dir
