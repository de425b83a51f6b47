"""What building sharded stages takes: a rank that holds a share of a model never holds all of it."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mmtrain.models.build_stage import StageOptions, build_stage_without_weights
from mmtrain.models.megatron import ParallelGroups
from mmtrain.models.optim import parameter_specs
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.shapes.param_spec import ParamSpec
from mmtrain.models.stage.fully_sharded import UnitSharding, initialize_shards, shard_stage
from mmtrain.models.stage.stage_module import StageSpec
from tests.distributed import run_ranks
from tests.models.factory import CPU, settings, shape_of, stage, text
from tests.models.live_tensors import LiveTensors

NUM_RANKS = 4
MODEL = settings(llm={"hidden": 64, "ffn": 256, "layers": 8, "vocab": 128})


class ReadNumbers:
    """A source of weights that holds all, and notes how many elements a rank reads."""

    def __init__(self) -> None:
        self.num_read = 0

    def fill(self, param: torch.Tensor, spec: ParamSpec, tp_rank: int, tp: int) -> bool:
        raise AssertionError("a whole parameter is wanted")

    def fill_range(self, values: torch.Tensor, spec: ParamSpec, tp_rank: int, tp: int, first: int) -> bool:
        self.num_read += values.numel()
        values.copy_(torch.arange(first, first + values.numel()))
        return True

    def fill_master(self, *_: Any) -> bool:
        return False


def _build_in_small_draws(dtype: torch.dtype, is_pretrained: bool) -> dict[str, float]:
    """Build the LLM in shards, drawn in blocks as a large model is; processes of ranks serve later tests too."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parameter_specs, "MAX_ELEMENTS_DRAWN_AT_ONCE", 256)
        return _build(dtype, is_pretrained)


def _build(dtype: torch.dtype, is_pretrained: bool) -> dict[str, float]:
    """Build the LLM in shards; return what this rank took of it, in elements of the whole model."""
    shape = shape_of(MODEL)
    num_layers = len(shape.unit("llm").layers)
    source = ReadNumbers() if is_pretrained else None
    options = StageOptions(dtype, CPU, 1, "sdpa", source)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    sharding = UnitSharding(mesh, mesh)
    groups = ParallelGroups.single()
    llm = build_stage_without_weights(MODEL, shape, StageSpec("llm", (0, num_layers)), groups, options)
    specs = stage_param_specs(llm, "llm", 1)
    sizes = {index: sum(p.numel() for p in layer.parameters()) for index, layer in llm.layers.items()}
    with LiveTensors(on_host=True) as live:
        shard_stage(llm, sharding, CPU, dtype)
    drawn = _CountedDraws()
    with drawn:
        initialize_shards(llm, specs, sharding, groups.tp, 1, dtype, source)
    dist.barrier()
    return {
        "whole": sum(sizes.values()),
        "largest layer": max(sizes.values()),
        "peak": live.peak / 4,  # bytes of fp32
        "drawn": drawn.num_elements,
        "read": 0 if source is None else source.num_read,
    }


class _CountedDraws(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that are drawn."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "normal_":
            self.num_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_pretrained", [False, True])
def test_a_rank_never_holds_more_than_its_shards_and_one_layer(dtype: torch.dtype, is_pretrained: bool) -> None:
    for took in run_ranks(NUM_RANKS, _build_in_small_draws, dtype, is_pretrained):
        share = took["whole"] / NUM_RANKS
        assert took["largest layer"] < share, "the model is too small to tell one layer from all"
        assert took["peak"] <= 1.05 * (share + took["largest layer"] * (1 + 1 / NUM_RANKS))
        if is_pretrained:
            assert (took["drawn"], took["read"]) == (0, share)
        else:  # blocks are cut where tensor parallelism cuts: of columns, a rank's rows need all
            assert 0 < took["drawn"] < 0.65 * took["whole"]


def test_hooks_of_a_block_run_once_for_an_empty_microbatch() -> None:
    """FSDP gathers and reduces in them: a rank that did so twice would wait for the others for good."""
    llm = stage(MODEL, "llm", (1, 2))
    calls = []
    llm.layers["1"].register_forward_hook(lambda *_: calls.append(1))
    out = llm(torch.zeros(0, 64), text())
    assert (out.shape, calls) == ((0, 64), [1])
