"""A run in bf16 that starts from an fp32 folder trains its fp32 weights, not their bf16 rounding."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mmtrain.models.optim.parameter_specs import NamedShard, tp_shard
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.world import World
from mmtrain.weights import FolderTensors, PretrainedWeights, open_pretrained
from tests.distributed import run_ranks
from tests.flow.cases import Mesh, plan
from tests.flow.gather import copy, whole
from tests.weights.comparison import unit_stage
from tests.weights.pretrained import VOCAB, qwen2, recipe_from, save, specs_of

CPU = torch.device("cpu")


def _weights(recipe: Recipe) -> PretrainedWeights:
    weights = open_pretrained(recipe)
    assert weights is not None
    return weights


@pytest.mark.parametrize("elements_per_read", [100, 1 << 20])
def test_a_shard_of_masters_is_what_the_folder_holds(
    elements_per_read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every parameter, both tensor-parallel ranks, and ranges that start and end inside of rows."""
    monkeypatch.setattr("mmtrain.weights.import_weights.MAX_ELEMENTS_PER_READ", elements_per_read)
    recipe = recipe_from(save(qwen2(), tmp_path / "model"))
    stage, weights = unit_stage(recipe), _weights(recipe)
    params = {f"llm.{name}": param.detach() for name, param in stage.named_parameters()}
    sizes: list[int] = []
    read = FolderTensors.read

    def measure(tensors: FolderTensors, name: str, box: tuple[tuple[int, int], ...]) -> Tensor:
        part = read(tensors, name, box)
        sizes.append(part.numel())
        return part

    monkeypatch.setattr(FolderTensors, "read", measure)
    for name, spec in specs_of(stage).items():
        for rank in range(2):
            expected = tp_shard(params[name].view(spec.full_shape), spec, rank, 2).reshape(-1)
            first, last = len(expected) // 3, len(expected) - 7
            master = torch.full((last - first,), float("nan"))
            assert weights.fill_master(master, spec, rank, 2, first, torch.bfloat16)
            assert torch.equal(master, expected[first:last]), name
    assert max(sizes) <= elements_per_read


@pytest.mark.parametrize(
    ("stored", "computed", "is_finer"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float16, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float16, False),
        (torch.float16, torch.float32, False),
    ],
)
def test_masters_are_read_only_where_the_folder_knows_more(
    stored: torch.dtype, computed: torch.dtype, is_finer: bool, tmp_path: Path
) -> None:
    recipe = recipe_from(save(qwen2(), tmp_path / "model", stored))
    spec = specs_of(unit_stage(recipe))["llm.layers.3.norm.weight"]
    master = torch.zeros(48)
    assert _weights(recipe).fill_master(master, spec, 0, 1, 0, computed) is is_finer
    assert bool(master.any()) is is_finer


def _masters_at_start(recipe: Recipe) -> list[NamedShard]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layout = plan(recipe, llm=Mesh((2,), tuple(range(size)), tp=2, dp=2))
    chosen = layout.model_copy(update={"precision": "bf16"})
    context = build_rank_context(recipe, chosen, World(rank, size, CPU), pretrained=open_pretrained(recipe))
    assert {p.dtype for stage in context.units["llm"].stages.values() for p in stage.parameters()} == {torch.bfloat16}
    return [copy(shard) for shard in context.optimizer.units["llm"].shards() if "#" not in shard.name]


@pytest.mark.slow
def test_the_masters_of_a_bf16_run_are_the_fp32_weights(tmp_path: Path) -> None:
    """At tp 2, pp 2 and two replicas, whose optimizers share the masters."""
    theirs = qwen2()
    recipe = recipe_from(save(theirs, tmp_path / "model"), "train.precision=bf16")
    ranks = run_ranks(8, _masters_at_start, recipe)
    masters = whole([shard for shards in ranks for shard in shards])
    expected = dict(unit_stage(recipe).named_parameters())
    assert masters.keys() == {f"llm.{name}" for name in expected}
    for name, param in expected.items():
        assert torch.equal(masters[f"llm.{name}"].reshape(param.shape), param.detach()), name
    table = theirs.state_dict()["model.embed_tokens.weight"]
    assert torch.equal(masters["llm.layers.0.table.weight"][:VOCAB], table)
    assert not torch.equal(table, table.bfloat16().float()), "in bf16 they are other numbers"
