"""The MLP of a recomputed block in chunks of tokens gives what it gives at once, and holds less."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mmtrain.models.build_stage import StageOptions, build_stage_without_weights
from mmtrain.models.kernels.keyed_dropout import token_keys
from mmtrain.models.megatron import ParallelGroups, block_segments
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.stage.fully_sharded import UnitSharding, initialize_shards, shard_stage
from mmtrain.models.stage.stage_inputs import TextInput
from mmtrain.models.stage.stage_module import StageSpec
from tests.distributed import run_ranks
from tests.models.factory import CPU, SCALED, images, randomize, settings, shape_of, stage, text
from tests.models.live_tensors import LiveTensors

CHUNK_TOKENS = 10  # does not divide the tokens of the inputs
AT_ONCE = 1000
LENGTHS = (9, 12, 16)
FREEZE_ALL_BUT_AN_MLP = ("llm.layers.0.*", "llm.layers.[124].*", "llm.layers.3.[!m]*")
DROPPING: dict[str, Any] = {"rank": 2, "targets": ("llm.*",), "dropout": 0.4}
# unit; settings of its model; how it trains
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "swiglu": ("llm", {}, {}),
    "norms behind the mlp": ("llm", {"llm": {"post_norms": True}}, {}),
    "adapters": ("llm", {}, {"lora": {"rank": 2, "targets": ("llm.*mlp.*",)}}),
    "adapters that drop inputs": ("llm", {}, {"lora": DROPPING}),
    "adapters of attention alone": ("llm", {}, {"lora": {"rank": 2, "targets": ("llm.*.linear_qkv",)}}),
    "nothing but an mlp trains": ("llm", {}, {"freeze": FREEZE_ALL_BUT_AN_MLP}),
    "gelu with biases": ("vision", {}, {}),
    "scaled output": ("vision", {"vision": SCALED}, {}),
}


def _run(
    unit: str, model: dict[str, Any], chunk_tokens: int, sums_in_fp32: bool = False, **more: Any
) -> tuple[dict[str, Tensor], int]:
    """Run a stage with all blocks recomputed; return its gradients by name, and the most bytes alive."""
    made = settings(**model)
    num_layers = len(shape_of(made).unit(unit).layers)
    module = stage(made, unit, recompute=range(1, num_layers - 1), **more)
    randomize(module)
    live = LiveTensors(on_host=True)
    live.ignore(module.parameters())
    if sums_in_fp32:
        for param in module.parameters():
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
            live.ignore([param.main_grad])  # type: ignore[attr-defined]
    inputs = text(*LENGTHS) if unit == "llm" else images((4, 6), (2, 2), (6, 4))
    if isinstance(inputs, TextInput):
        inputs = replace(inputs, token_keys=torch.from_numpy(token_keys(range(len(LENGTHS)), LENGTHS)))
    with patch.object(block_segments, "MLP_CHUNK_TOKENS", chunk_tokens), live:
        module(None, inputs).square().sum().backward()
    grads = {}
    for name, param in module.named_parameters():
        parts = [part for part in (param.grad, getattr(param, "main_grad", None)) if part is not None]
        if parts:
            grads[name] = torch.stack(parts).sum(dim=0)
    return grads, live.peak


@pytest.mark.parametrize("sums_in_fp32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_an_mlp_in_chunks_has_the_gradients_of_one_at_once(case: str, sums_in_fp32: bool) -> None:
    unit, model, training = CASES[case]
    at_once, _ = _run(unit, model, AT_ONCE, sums_in_fp32, **training)
    in_chunks, _ = _run(unit, model, CHUNK_TOKENS, sums_in_fp32, **training)
    assert at_once.keys() == in_chunks.keys()
    assert any(gradient.abs().sum() > 0 for gradient in at_once.values())
    for name, gradient in at_once.items():
        torch.testing.assert_close(in_chunks[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def test_an_mlp_in_chunks_holds_less_and_runs_as_often() -> None:
    """Recomputation of a block skips the MLP, which backward runs anyway, chunk by chunk."""
    model = {"llm": {"ffn": 960}}
    peaks = [_run("llm", model, chunk_tokens, sums_in_fp32=True)[1] for chunk_tokens in (AT_ONCE, CHUNK_TOKENS)]
    inner_bytes = 4 * 3 * 960 * (sum(LENGTHS) - CHUNK_TOKENS)  # of a gated MLP, for the tokens outside a chunk
    assert peaks[0] - peaks[1] > inner_bytes
    rows: list[int] = []
    whole = block_segments.run_mlp_in_chunks

    def counted(mlp: Any, *args: Any, **settings_: Any) -> Tensor:
        def run(x: Tensor, of_chunk: slice) -> Tensor:
            rows.append(len(x))
            out: Tensor = mlp(x, of_chunk)
            return out

        return whole(run, *args, **settings_)

    with patch("mmtrain.models.megatron.block_segments.run_mlp_in_chunks", counted):
        _run("llm", model, CHUNK_TOKENS)
    assert sum(rows) == 3 * 2 * sum(LENGTHS)  # three blocks, forward and backward
    assert max(rows) == CHUNK_TOKENS


def _on_slices(chunk_tokens: int, training: dict[str, Any]) -> dict[str, Tensor]:
    group, alone = dist.group.WORLD, ParallelGroups.single()
    assert group is not None
    groups = ParallelGroups(tp=group, dp=alone.dp, pp=alone.pp)
    return _run("llm", {}, chunk_tokens, groups=groups, sequence_parallel=True, **training)[0]


@pytest.mark.parametrize("training", [{}, {"lora": DROPPING}], ids=["whole model", "adapters that drop inputs"])
def test_ranks_that_share_the_tokens_between_gemms_gather_them_chunk_by_chunk(training: dict[str, Any]) -> None:
    at_once, in_chunks = (run_ranks(2, _on_slices, tokens, training) for tokens in (AT_ONCE, CHUNK_TOKENS))
    for whole, chunked in zip(at_once, in_chunks, strict=True):
        for name, gradient in whole.items():
            torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


def _sharded(chunk_tokens: int) -> dict[str, Tensor]:
    """Run an LLM that FSDP shards, with all blocks recomputed; return this rank's shards of gradients by name."""
    model = settings()
    shape = shape_of(model)
    num_layers = len(shape.unit("llm").layers)
    spec = StageSpec("llm", (0, num_layers), frozenset(range(1, num_layers - 1)))
    options = StageOptions(torch.float32, CPU, 1, "sdpa")
    groups = ParallelGroups.single()
    module = build_stage_without_weights(model, shape, spec, groups, options)
    specs, mesh = stage_param_specs(module, "llm", 1), init_device_mesh("cpu", (2,))
    sharding = UnitSharding(mesh, mesh)
    shard_stage(module, sharding, CPU, torch.float32)
    initialize_shards(module, specs, sharding, groups.tp, 1, torch.float32, None)
    with patch.object(block_segments, "MLP_CHUNK_TOKENS", chunk_tokens):
        module(None, text(*LENGTHS)).backward()
    return {name: param.grad.to_local() for name, param in module.named_parameters()}  # type: ignore[union-attr]


def test_ranks_that_shard_the_weights_reduce_the_same_gradients() -> None:
    at_once, in_chunks = (run_ranks(2, _sharded, chunk_tokens) for chunk_tokens in (AT_ONCE, CHUNK_TOKENS))
    for whole, chunked in zip(at_once, in_chunks, strict=True):
        assert any("mlp" in name for name in whole)
        for name, gradient in whole.items():
            torch.testing.assert_close(chunked[name], gradient, rtol=1e-4, atol=1e-6)
