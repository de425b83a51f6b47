import importlib.metadata
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn

from mmtrain.models.megatron import ParallelGroups, optimizer_scope, prepare_megatron
from mmtrain.models.megatron.triton_stand_in import triton_stands_in
from mmtrain.models.megatron.zero_adamw import _buffers
from tests.models.factory import CPU, settings, stage

ROOT = Path(__file__).parents[2]
# Imports everything of Megatron-core that a run uses, and looks for what should not be there afterwards.
IMPORT_WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import mmtrain.models.build_stage, mmtrain.models.megatron.zero_adamw, mmtrain.models.megatron.lora
from mmtrain.models.megatron.triton_stand_in import _StandIn
from torch.utils._triton import has_triton_package
assert sys.modules["triton"] is None and "triton.language" not in sys.modules
assert not has_triton_package()
holders = {name for name, module in list(sys.modules.items())
           for value in list(vars(module or object).values()) if type(value) is _StandIn}
print(*sorted(name for name in holders if not name.startswith("megatron.")))
"""

# Megatron-core would load both, and what they load, in every rank.
IMPORT_WITHOUT_TRACKERS = """
import sys
import mmtrain.runtime.training.train, mmtrain.runtime.execution.rank_context
print(*sorted({"boto3", "tensorboard", "wandb"} & sys.modules.keys()))
import wandb
from torch.utils.tensorboard import SummaryWriter
"""


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)


def test_megatron_core_is_imported_without_triton_and_without_a_word_on_cuda() -> None:
    env = os.environ | {"CUDA_HOME": "/usr/local/cuda", "CUDA_VISIBLE_DEVICES": ""}  # a toolkit, and no GPU
    command = [sys.executable, "-W", "error", "-c", IMPORT_WITHOUT_TRITON]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_training_is_imported_without_trackers_which_can_be_imported_later() -> None:
    command = [sys.executable, "-c", IMPORT_WITHOUT_TRACKERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


@pytest.mark.usefixtures("no_triton")
def test_the_stand_in_for_triton_defines_kernels_and_leaves() -> None:
    with triton_stands_in():
        import triton
        import triton.language as tl

        @triton.jit
        def plain(x: tl.constexpr) -> tl.int32:
            return x

        @triton.autotune(configs=[], key=["x"])
        @triton.jit(debug=True)
        def with_options(x: int) -> int:
            return x + 1

        assert (plain(1), with_options(1)) == (1, 2)
        assert Version(triton.__version__) < Version("2.0")
    with pytest.raises(ImportError):
        import triton


@pytest.mark.parametrize("installed", [True, False])
def test_an_installed_triton_is_left_alone(installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    if installed:
        (tmp_path / "triton.py").write_text("NAME = 'the real one'\n")
    with triton_stands_in():
        import triton

        assert (triton.NAME == "the real one") is installed
    assert ("triton" in sys.modules) is installed
    sys.modules.pop("triton", None)


def test_megatron_core_logs_nothing_of_blocks_and_buffers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm = stage(settings(), "llm")
        with optimizer_scope(CPU):
            _buffers(nn.ModuleList(llm.layers.values()), ParallelGroups.single())
    assert [record.getMessage() for record in caplog.records] == []


def test_the_installed_megatron_core_is_the_pinned_one() -> None:
    pinned = "0.16.1" if sys.version_info < (3, 12) else "0.19.2"
    assert importlib.metadata.version("megatron-core") == pinned


def test_prepare_megatron_sets_the_device_and_can_be_undone() -> None:
    for _ in range(2):
        prepare_megatron(CPU)
        assert torch.cuda.current_device() == CPU
        torch.cuda.current_stream()  # without CUDA torch itself would raise
    prepare_megatron(torch.device("cuda"))
    assert torch.cuda.current_device.__module__ == "torch.cuda"


@pytest.mark.parametrize("turn", ["first", "second"])
def test_a_stage_on_the_host_leaves_torch_as_it_was_for_the_next_test(turn: str) -> None:
    """Otherwise tests that ask the GPU themselves, such as those of its clock, fail beside others in one process."""
    del turn
    assert {torch.cuda.current_device.__module__, torch.cuda.current_stream.__module__} == {"torch.cuda"}
    stage(settings(), "llm")
    assert torch.cuda.current_stream() is None


def test_optimizer_scope_translates_cuda_names_on_a_cpu() -> None:
    tensor = torch.zeros(2)
    with optimizer_scope(CPU):
        assert torch.zeros(1, device="cuda").device == CPU
        assert torch.ones(1, device=torch.device("cuda", 0)).device == CPU
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.long().type() == "torch.LongTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


def test_the_collection_leaves_nothing_for_megatron_to_create() -> None:
    groups = ParallelGroups.single()
    collection = groups.collection()
    for name in ("tp", "dp", "pp", "cp", "ep", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "intra_dist_opt"):
        assert isinstance(getattr(collection, name), dist.ProcessGroup), name
    assert groups.device == CPU
