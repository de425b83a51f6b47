"""A few minutes on a CUDA machine that say whether it computes what the tests hold CPUs to. Prints a table.

    python scripts/smoke_cuda.py

Attention backends against the reference; a tiny model trained on one GPU against one process on the CPU, with layers
recomputed and frozen, in fp32 and bf16; with several GPUs the meshes of the master test that fit on them. Exits with 0
if everything agrees, 1 if something does not, 2 where there is no CUDA. Needs the development dependencies.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests hold the model, the batch and the meshes

from mmtrain.errors import UserError
from mmtrain.models.attention import AttentionBackend, AttentionOptions, attend, choose_backend
from mmtrain.recipe import Recipe
from mmtrain.runtime.execution.rank_context import build_rank_context
from mmtrain.runtime.training.lr_schedule import learning_rate
from mmtrain.runtime.world import World
from tests.flow.cases import Mesh, Reference, plan, recipe, step_data
from tests.flow.test_master import CASES, PLAIN

Meshes = dict[str, Mesh]
Curve = list[tuple[float, ...]]  # (loss, gradient norm) of each step
Run = Callable[[Recipe, Meshes], Curve]  # trains on the machine under test; without meshes, one process on the CPU

NUM_STEPS = 5
ALONE: Meshes = {"vision": Mesh((), (0,)), "llm": Mesh((), (0,))}
RECOMPUTED: Meshes = {"vision": Mesh((), (0,), recompute=(0, 1, 2, 3)), "llm": Mesh((), (0,), recompute=(1, 2, 3, 4))}
FROZEN = {"train__freeze": ("vision.layers.[01].*", "llm.layers.[02].*", "*norm*")}
KERNELS_NEED = {"model__llm__head_dim": 8}  # a multiple of 8
FP32, BF16 = {"train__precision": "fp32"}, {"train__precision": "bf16"}
# Relative. Adam amplifies the rounding of tiny gradients from step to step, so norms in bf16 say little.
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "same": 1e-5}


@dataclass(frozen=True)
class Row:
    """One line of the table: what was compared, by how much it differed, and how much it may."""

    check: str
    difference: float | str  # text says why the check was left out
    allowed: float = 0.0

    @property
    def verdict(self) -> str:
        """`ok`, `WRONG` or `left out`."""
        if isinstance(self.difference, str):
            return "left out"
        return "ok" if self.difference <= self.allowed else "WRONG"

    def __str__(self) -> str:
        shown = self.difference if isinstance(self.difference, str) else f"{self.difference:.1e} of {self.allowed:.0e}"
        return f"{self.verdict:<9}{self.check:<66}{shown}"


def main() -> int:
    if not torch.cuda.is_available():
        print(
            f"smoke_cuda: torch {torch.__version__} sees no CUDA device here; run this on a machine with one. "
            "On a CPU `make test` holds the same equalities.",
            file=sys.stderr,
        )
        return 2
    print(f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}")
    wrong = 0
    for row in rows(torch.device("cuda"), torch.cuda.device_count(), spawned):
        print(row, flush=True)
        wrong += row.verdict == "WRONG"
    print(f"{wrong} wrong" if wrong else "everything agrees")
    return 1 if wrong else 0


def rows(device: torch.device, num_devices: int, run: Run) -> Iterator[Row]:
    """Yield every comparison that this machine allows."""
    yield from attention_rows(device)
    yield from training_rows(device, run)
    yield from mesh_rows(num_devices, run)


def attention_rows(device: torch.device) -> Iterator[Row]:
    """Compare each backend with the fp32 reference: outputs and gradients, causal or not, fewer KV heads or not."""
    for dtype in (torch.float32, torch.bfloat16):
        for backend in get_args(AttentionBackend):
            name = f"attention {backend}, {dtype}"
            try:
                choose_backend(backend, device, dtype)
            except UserError as e:
                yield Row(name, str(e).partition("here: ")[2].partition(". Usable")[0])
                continue
            masks = ((True, 0), (True, 40), (False, 0))
            kinds = [(AttentionOptions(backend, *mask), kv_heads) for mask in masks for kv_heads in (1, 4)]
            worst = max(_attention_difference(options, device, dtype, kv_heads) for options, kv_heads in kinds)
            yield Row(name, worst, 2e-2 if dtype == torch.bfloat16 else 1e-4)


def training_rows(device: torch.device, run: Run) -> Iterator[Row]:
    """Compare five steps on one device with one process on the CPU in fp32."""
    settings = recipe(**KERNELS_NEED, **FP32)
    expected, actual = run(settings, {}), run(settings, ALONE)
    yield Row("train fp32, one device / CPU", difference(actual, expected), TOLERANCE["fp32"])
    yield Row("train fp32, recomputed / kept", difference(run(settings, RECOMPUTED), actual), TOLERANCE["same"])
    frozen = recipe(**KERNELS_NEED, **FP32, **FROZEN)
    yield Row("train fp32, partly frozen / CPU", difference(run(frozen, ALONE), run(frozen, {})), TOLERANCE["fp32"])
    for backend in get_args(AttentionBackend):
        try:
            choose_backend(backend, device, torch.bfloat16)
        except UserError:
            continue  # said above
        half = recipe(**KERNELS_NEED, **BF16, train__attention=backend)
        actual = run(half, ALONE)
        losses = difference([curve[:1] for curve in actual], [curve[:1] for curve in expected])
        yield Row(f"train bf16 with {backend}, one device / CPU fp32, losses", losses, TOLERANCE["bf16"])


def mesh_rows(num_devices: int, run: Run) -> Iterator[Row]:
    """Compare the master test's meshes of two or more ranks that fit with one process on the CPU."""
    for name, (changes, meshes) in (PLAIN | CASES).items():
        if not 1 < num_ranks(meshes) <= num_devices:
            continue
        settings = recipe(**{**KERNELS_NEED, **FP32, **changes})
        yield Row(f"mesh: {name}", difference(run(settings, meshes), run(settings, {})), TOLERANCE["fp32"])


def num_ranks(meshes: Meshes) -> int:
    return len({rank for mesh in meshes.values() for rank in mesh.ranks})


def difference(actual: Curve, expected: Curve) -> float:
    """Return the largest relative difference between two curves."""
    pairs = [(a, b) for f, w in zip(actual, expected, strict=True) for a, b in zip(f, w, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def train(settings: Recipe, meshes: Meshes, device: torch.device) -> Curve:
    """Train on this rank of a world that exists; without meshes, plainly and sample by sample."""
    if not meshes:
        reference = Reference(settings)
        return [reference.step()[:2] for _ in range(NUM_STEPS)]
    world = World(dist.get_rank(), dist.get_world_size(), device)
    job = build_rank_context(settings, plan(settings, **meshes), world)
    curve: Curve = []
    for step in range(NUM_STEPS):
        outcome = job.train(step_data(job, step), learning_rate(settings.train.optimizer, step, NUM_STEPS))
        assert outcome.grad_norm is not None
        curve.append((world.all_reduce(outcome.loss), outcome.grad_norm))
    return curve


def spawned(settings: Recipe, meshes: Meshes) -> Curve:
    """Train in spawned processes, one for each GPU, because CUDA forbids forking."""
    size = num_ranks(meshes) or 1
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, get_context("spawn")) as pool:
        ranks = [pool.submit(_rank, rank, size, f"{folder}/store", settings, meshes) for rank in range(size)]
        return ranks[0].result()


def _rank(rank: int, size: int, store: str, settings: Recipe, meshes: Meshes) -> Curve:
    device = torch.device("cuda", rank) if meshes else torch.device("cpu")
    options: dict[str, Any] = {"backend": "gloo"}
    if meshes:
        torch.cuda.set_device(device)
        options = {"backend": "cpu:gloo,cuda:nccl"}  # as `runtime.world.join` does, without binding the device
    timeout = timedelta(seconds=120)
    dist.init_process_group(store=FileStore(store, size), rank=rank, world_size=size, timeout=timeout, **options)
    curve = train(settings, meshes, device)
    dist.destroy_process_group()
    return curve


def _attention_difference(options: AttentionOptions, device: torch.device, dtype: torch.dtype, kv_heads: int) -> float:
    """Return the largest difference of output and gradients, relative to the largest value of each."""
    lengths = (33, 1, 128, 70)
    heads = 4
    width = 64
    sizes = ((sum(lengths), n, width) for n in (heads, kv_heads, kv_heads, heads))
    generator = torch.Generator().manual_seed(0)
    q, k, v, up = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)

    def run(how: AttentionOptions, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(leaves[0], leaves[1], leaves[2], lengths, how)
        return [out.detach(), *torch.autograd.grad(out, leaves, up.to(out.dtype))]

    expected = run(replace(options, backend="reference"), [x.float() for x in (q, k, v)])
    pairs = zip(run(options, (q, k, v)), expected, strict=True)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
