"""Bits of weights and optimizer state that flip by themselves: they are found, named, and the run goes back."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mmtrain.checkpoint import Shard, ShardSpec, open_newest_good
from mmtrain.durable_files import read_log
from mmtrain.errors import CheckpointError
from mmtrain.models.optim.held_state import BitSums
from mmtrain.runtime.execution.checkpointing import require_sums
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, CORRUPTION_FILE, read_run_state
from mmtrain.runtime.training.train import MAX_RESTORES
from tests.faults import FlipBit
from tests.flow.runs import REPLICATED, SHARDED, assert_same_end, refuse, request_for, run_all

EVERY = "train.corruption_check.every=3"
RESTORE = "train.on_corruption=restore"
WEIGHT, NORM = "llm.layers.1.mlp.linear_fc1.weight", "llm.layers.1.input_layernorm.weight"
OF_VISION, OF_EXPERT = (
    "vision.layers.1.self_attention.linear_proj.weight",
    "llm.layers.1.mlp.experts.2.linear_fc1.weight",
)
ADAPTER = "llm.layers.1.self_attention.linear_proj.lora.a"
PAIR = ("parallel.placement=unified", "parallel.llm.dp=2", "parallel.vision.dp=2")
TRIPLE = ("parallel.placement=unified", "parallel.llm.dp=3", "parallel.vision.dp=3", "train.global_batch=6")
TENSORS = ("parallel.placement=unified", "parallel.llm.tp=2", "parallel.vision.tp=2")
COLOCATED = ("parallel.placement=colocated", "parallel.llm.pp=2")
COPIES = ("parallel.placement=replicated", "parallel.shard=1", "parallel.dispatch=all")
EXPERT_PARALLEL = (*PAIR, "parallel.llm.ep=2")
EXPERTS = (
    "model.llm.moe={experts: 4, top_k: 2, ffn: 16, scores: sigmoid, selection_bias: true, selection_bias_rate: 0.01}"
)
LORA = "train.lora={rank: 4, targets: [llm.*.linear_*], also_train: [vision.projector.*]}"
MUON = "train.optimizer={lr: 0.001, kind: muon}"
BF16 = "train.precision=bf16"


@dataclass(frozen=True)
class Case:
    """A plan, the bit that flips in its fourth step, and what is said of it."""

    settings: tuple[str, ...]
    rank: int
    name: str
    said: str
    num_ranks: int = 2
    in_update: bool = False


def changed(rank: int, name: str) -> str:
    """Say that a tensor of one rank changed between two updates."""
    return rf"on rank {rank} \([^ ]+\), {name} changed between steps 3 and 4"


def differs(ranks: str, name: str) -> str:
    """Say that ranks hold different bits since the fourth step."""
    return rf"ranks {ranks} \([^ ]+\) differ in {name}, since step 4; nothing says which of them is wrong"


def outvoted(rank: int, name: str) -> str:
    """Say that one rank holds other bits than most."""
    return rf"on rank {rank} \([^ ]+\), {name} differ from those of most ranks that should hold the same, since step 4"


CASES = {
    "disaggregated, a moment": Case((), 1, f"{WEIGHT}#exp_avg_sq", changed(1, f"{WEIGHT}#exp_avg_sq")),
    "disaggregated, weights": Case((), 1, WEIGHT, changed(1, WEIGHT)),
    "unified, a shard": Case(PAIR, 0, WEIGHT, changed(0, WEIGHT)),
    "unified, gathered weights": Case(PAIR, 0, f"{NORM}#gathered", differs("0, 1", f"{NORM}#gathered")),
    "unified, gathered by three": Case(TRIPLE, 1, f"{NORM}#gathered", outvoted(1, f"{NORM}#gathered"), num_ranks=3),
    "colocated": Case(COLOCATED, 1, f"{OF_VISION}#exp_avg", changed(1, f"{OF_VISION}#exp_avg")),
    "replicated": Case(REPLICATED, 1, WEIGHT, changed(1, WEIGHT)),
    "replicated, in an update of copies": Case(COPIES, 1, NORM, differs("0, 1", NORM), in_update=True),
    "replicated, zero 1": Case(
        (SHARDED[0], "parallel.zero=1"), 1, f"{WEIGHT}#exp_avg", changed(1, f"{WEIGHT}#exp_avg")
    ),
    "replicated, zero 2": Case((*SHARDED, "parallel.zero=2"), 1, WEIGHT, changed(1, WEIGHT)),
    "tensor parallel, in an update of a norm": Case(TENSORS, 1, NORM, differs("0, 1", NORM), in_update=True),
    "adapters, frozen weights": Case(
        (*PAIR, LORA), 0, WEIGHT, rf"on rank 0 \([^ ]+\), {WEIGHT} changed between steps 3 and 6"
    ),
    "adapters": Case((*PAIR, LORA), 1, ADAPTER, changed(1, ADAPTER)),
    "muon": Case((*PAIR, MUON), 0, f"{WEIGHT}#momentum", changed(0, f"{WEIGHT}#momentum")),
    "experts": Case((*EXPERT_PARALLEL, EXPERTS), 1, OF_EXPERT, changed(1, OF_EXPERT)),
    "bf16 weights": Case((*PAIR, BF16), 0, f"{WEIGHT}#rounded", changed(0, f"{WEIGHT}#rounded")),
}


@pytest.mark.slow  # `tests/runtime/test_state_sums.py` flips every bit; here each case trains twice
@pytest.mark.parametrize("name", CASES)
def test_a_bit_that_flips_is_found_and_the_run_goes_back(data: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    ranks = f"cluster.ranks={case.num_ranks}"
    settings = (EVERY, RESTORE, ranks, "train.checkpoint.every=3", *case.settings)
    unbroken, broken = (request_for(data, tmp_path / run, *settings) for run in ("unbroken", "broken"))
    assert run_all(*[unbroken] * case.num_ranks) == [""] * case.num_ranks
    fault = FlipBit(case.rank, 3, case.name, tmp_path / "flipped", case.in_update)
    assert run_all(*[broken] * case.num_ranks, faults=fault) == [""] * case.num_ranks
    [found] = read_log(broken.run_dir / CORRUPTION_FILE).entries
    assert (found["step"], found["checked_step"]) == (6, 3)
    assert re.fullmatch(case.said, found["problem"])
    assert_same_end(broken.run_dir, unbroken.run_dir)


def test_a_run_ends_where_a_bit_flipped_and_names_it(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "run", "train.corruption_check.every=2")
    errors = run_all(request, request, faults=FlipBit(1, 2, f"{WEIGHT}#exp_avg_sq", tmp_path / "flipped"))
    for error in errors:
        assert error.startswith("StateCorrupted: step 4: ")
        assert "on rank 1 (" in error
        assert f"{WEIGHT}#exp_avg_sq changed between steps 2 and 3" in error
    assert read_run_state(request.run_dir)["status"] == "failed"
    newest = open_newest_good(request.run_dir / CHECKPOINTS_FOLDER, refuse)
    assert (newest.step, newest.state["checked_step"]) == (2, 2)


def test_a_checkpoint_whose_copy_differs_from_what_was_checked_is_not_saved() -> None:
    tensor = torch.arange(8.0)
    sums = {"w": int(BitSums([tensor], tensor.device).compute())}
    shard = Shard("w", ShardSpec((8,)), tensor.clone())
    require_sums([shard, replace(shard, name="never summed")], sums)
    shard.tensor.view(torch.uint8).numpy()[3] ^= 4
    with pytest.raises(CheckpointError, match=r"w on .* has changed since it was checked"):
        require_sums([shard], sums)


@pytest.mark.slow
def test_a_run_whose_bits_flip_again_and_again_ends(data: Path, tmp_path: Path) -> None:
    request = request_for(data, tmp_path / "run", "train.corruption_check.every=2", RESTORE)
    fault = FlipBit(1, 2, WEIGHT, tmp_path / "never written" / "flipped")
    for error in run_all(request, request, faults=fault):
        assert error.startswith("StateCorrupted: step 4: ")
    assert len(read_log(request.run_dir / CORRUPTION_FILE).entries) == MAX_RESTORES + 1
