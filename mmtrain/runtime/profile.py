"""`mmtrain profile`: measure what the layers of a recipe's model and messages between local ranks take here."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from pydantic import BaseModel
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from mmtrain.costs.measured import errors
from mmtrain.costs.table import CostTable, LayerEntry, LayerSample, MessageEntry, Timed, described, layer_key
from mmtrain.models.build import StageModule, build_stage
from mmtrain.models.inputs import UnitInput
from mmtrain.models.megatron import ParallelGroups, unit_scope
from mmtrain.models.shape import LayerShape, ModelShape, UnitShape, shape
from mmtrain.recipe import Recipe
from mmtrain.runtime.job import compute_dtype
from mmtrain.runtime.launch import launch_local
from mmtrain.runtime.probes import Probe, probes
from mmtrain.runtime.world import Address, World, join, leave

WARM_UP = 2
BUDGET_S = 0.25  # for the repeats of one measurement, as far as their least number allows
MESSAGES = 7  # repeats of one
OUTLIER = 3.0  # median deviations beyond which a repeat is dropped
MESSAGE_BYTES = tuple(2**k for k in (10, 14, 18, 20, 22, 24))


@dataclass(frozen=True)
class ProfileRequest:
    """What to measure."""

    recipe: Recipe
    hardware: str  # preset that stands for this machine
    tp: Mapping[str, tuple[int, ...]]  # tensor-parallel sizes of each unit to measure
    repeats: tuple[int, int] = (7, 25)  # of one measurement, at least and at most


@dataclass(frozen=True)
class Profile:
    """A table, and how well it foretells loads that it does not hold: relative errors by unit and tp."""

    table: CostTable
    errors: dict[str, tuple[float, ...]]

    @property
    def median_error(self) -> float:
        """Over everything held out; 0 without any."""
        everything = [error for found in self.errors.values() for error in found]
        return statistics.median(everything) if everything else 0.0


class _Found(BaseModel):
    """What the ranks of one tensor-parallel size measured."""

    layers: list[LayerEntry]
    messages: list[MessageEntry]
    errors: dict[str, list[float]]


def profile(request: ProfileRequest) -> Profile:
    """Measure every distinct layer of the model at every size asked for, in processes of this machine.

    Raises RunError where a process fails.
    """
    sizes = sorted({tp for sizes in request.tp.values() for tp in sizes})
    found: list[_Found] = []
    with TemporaryDirectory(prefix="mmtrain-profile-") as folder:
        for tp in sizes:
            out = Path(folder) / f"tp{tp}.json"
            launch_local(tp, partial(_measure_rank, request, tp, out))
            found.append(_Found.model_validate_json(out.read_text(encoding="utf-8")))
    entries = {
        "layers": tuple(entry for part in found for entry in part.layers),
        "messages": tuple(entry for part in found for entry in part.messages),
    }
    table = unmeasured(request).model_copy(update=entries)
    return Profile(table, {name: tuple(values) for part in found for name, values in part.errors.items()})


def unmeasured(request: ProfileRequest) -> CostTable:
    """The table without its entries: what it will say of this machine."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return CostTable(
        hardware=request.hardware,
        device=device_name(device),
        precision="bf16" if compute_dtype(request.recipe, device) == torch.bfloat16 else "fp32",
        software={"python": platform.python_version(), "torch": torch.__version__},
        date=time.strftime("%Y-%m-%d"),
    )


def _measure_rank(request: ProfileRequest, tp: int, out: Path, address: Address) -> None:
    """Be one rank of a tensor-parallel group; the first one writes what was found."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # a rank is one core
    world = join(address)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    group = dist.group.WORLD if tp > 1 else alone
    assert group is not None
    groups = ParallelGroups(tp=group, dp=alone, pp=alone)
    console = Console(stderr=True, quiet=not world.is_first)
    model = shape(request.recipe)
    units = [unit for unit in model.units if tp in request.tp.get(unit.name, ())]
    distinct = [(unit, index) for unit in units for index in _distinct(unit)]
    found = _Found(layers=[], messages=[], errors={})
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"tp {tp}", total=len(distinct) + 1)
        for unit, index in distinct:
            progress.update(task, description=f"tp {tp}: {unit.name} {unit.layers[index].kind}")
            entry, off = _measure_layer(request, model, unit, index, groups, world)
            found.layers.append(entry)
            found.errors.setdefault(f"{unit.name} tp{tp}", []).extend(off)
            progress.advance(task)
        found.messages = measure_messages(world, MESSAGE_BYTES) if tp > 1 else []
    if world.is_first:
        out.write_text(found.model_dump_json(), encoding="utf-8")
    leave()


def device_name(device: torch.device) -> str:
    """What is measured: the GPU, or one core of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"one core of {models[0] if models else platform.processor() or platform.machine()}"


def _distinct(unit: UnitShape) -> list[int]:
    """The first layer of each kind that differs in more than what trains."""
    keys: dict[str, int] = {}
    for index, layer in enumerate(unit.layers):
        keys.setdefault(layer_key(described(layer)), index)
    return list(keys.values())


def _measure_layer(
    request: ProfileRequest, model: ModelShape, unit: UnitShape, index: int, groups: ParallelGroups, world: World
) -> tuple[LayerEntry, list[float]]:
    """Time one layer on its probes; return its entry and the errors of what the entry foretells for others."""
    recipe = request.recipe
    dtype = compute_dtype(recipe, world.device)
    layer = unit.layers[index]

    def stage(recompute: bool) -> StageModule:
        built = build_stage(
            recipe.model,
            model,
            unit.name,
            (index, index + 1),
            groups,
            dtype=dtype,
            device=world.device,
            recompute=frozenset({index} if recompute else ()),
            seed=recipe.train.seed,
            attention=recipe.train.attention,
        )
        return built.requires_grad_(True)

    bench = _Bench(layer, stage(False), stage(True), groups, world, request.repeats)
    fitted, held_out = (
        [bench.sample(probe, probe.inputs(recipe, world.device, dtype), dtype) for probe in some]
        for some in probes(recipe, unit)
    )
    entry = LayerEntry(
        layer=described(layer), tp=groups.tp_size, samples=tuple(sorted(fitted, key=lambda s: (s.tokens, s.sum_sq)))
    )
    return entry, errors(entry, held_out)


@dataclass(frozen=True)
class _Bench:
    """One layer as two stages, the second of which recomputes it."""

    layer: LayerShape
    plain: StageModule
    again: StageModule
    groups: ParallelGroups
    world: World
    repeats: tuple[int, int]

    def sample(self, probe: Probe, inputs: UnitInput, dtype: torch.dtype) -> LayerSample:
        """Medians of everything a load can be timed for."""
        load = probe.load
        hidden = None
        if self.layer.kind not in ("patch_embed", "audio_embed", "embedding"):
            hidden = torch.randn(load.tokens, self.layer.hidden, device=self.world.device, dtype=dtype)
        ways: dict[Timed, Callable[[], tuple[float, float]]] = {
            "backward": lambda: self._once(self.plain, inputs, hidden, weights=True, input_grad=True),
            "recompute": lambda: self._once(self.again, inputs, hidden, weights=True, input_grad=True),
        }
        if hidden is not None:
            ways["backward_weight"] = lambda: self._once(self.plain, inputs, hidden, weights=True, input_grad=False)
            ways["backward_input"] = lambda: self._once(self.plain, inputs, hidden, weights=False, input_grad=True)
        pairs = {name: self._repeat(way) for name, way in ways.items()}
        seconds: dict[Timed, float] = {"forward": typical([f for f, _ in pairs["backward"]])}
        seconds |= {name: typical([b for _, b in found]) for name, found in pairs.items()}
        seconds["recompute"] = max(0.0, seconds["recompute"] - seconds["backward"])
        return LayerSample(
            tokens=load.tokens,
            sum_sq=load.sum_sq,
            max_len=load.max_len,
            num_sequences=load.num_sequences,
            seconds=seconds,
            activation_bytes=self._saved_bytes(inputs, hidden),
        )

    def _repeat(self, way: Callable[[], tuple[float, float]]) -> list[tuple[float, float]]:
        """Time again and again, as often on every rank."""
        for _ in range(WARM_UP):
            took = sum(way())
        least, most = self.repeats
        wanted = min(most, max(least, round(BUDGET_S / max(took, 1e-6))))
        times = self.world.broadcast(wanted)
        assert isinstance(times, int)
        return [way() for _ in range(times)]

    def _once(
        self, stage: StageModule, inputs: UnitInput, hidden: Tensor | None, *, weights: bool, input_grad: bool
    ) -> tuple[float, float]:
        """Seconds of a forward and of its backward."""
        stage.requires_grad_(weights)
        given = None if hidden is None else hidden.detach().requires_grad_(input_grad)
        with unit_scope(self.groups):
            self.world.barrier()
            begin = _now(self.world.device)
            out = stage(given, inputs, {})
            middle = _now(self.world.device)
            torch.autograd.backward(out, torch.ones_like(out))
            end = _now(self.world.device)
        stage.zero_grad(set_to_none=True)
        return middle - begin, end - middle

    def _saved_bytes(self, inputs: UnitInput, hidden: Tensor | None) -> int:
        """Bytes that a forward keeps for its backward, each storage once, weights not counted."""
        self.plain.requires_grad_(True)
        held = {p.untyped_storage().data_ptr() for p in self.plain.parameters()}
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in held:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        given = None if hidden is None else hidden.detach().requires_grad_()
        with unit_scope(self.groups), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.plain(given, inputs, {})
        del out
        return sum(kept.values())


def typical(seconds: Sequence[float]) -> float:
    """The median of repeats without outliers."""
    middle = statistics.median(seconds)
    spread = statistics.median([abs(s - middle) for s in seconds])
    return statistics.median([s for s in seconds if abs(s - middle) <= OUTLIER * spread or spread == 0])


def measure_messages(world: World, sizes: tuple[int, ...]) -> list[MessageEntry]:
    """Time messages of `sizes` bytes between the first two ranks, and collectives over all."""
    found = []
    # torch 2.13 renamed them and warns of the old names.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    ways: dict[str, Callable[[Tensor], None]] = {
        "p2p": lambda x: _pass_on(x, world),
        "all_reduce": lambda x: dist.all_reduce(x),
        "broadcast": lambda x: dist.broadcast(x, src=0),
        "all_gather": lambda x: gather(x, x.chunk(world.size)[world.rank].clone()),
        "reduce_scatter": lambda x: scatter(x.chunk(world.size)[world.rank].clone(), x),
    }
    for kind, way in ways.items():
        seconds = []
        for nbytes in sizes:
            data = torch.zeros(nbytes // 4 // world.size * world.size, device=world.device)
            for _ in range(WARM_UP):
                way(data)
            times = []
            for _ in range(MESSAGES):
                world.barrier()
                begin = _now(world.device)
                way(data)
                times.append(_now(world.device) - begin)
            seconds.append(typical(times))
        size = 2 if kind == "p2p" else world.size
        found.append(MessageEntry(kind=kind, size=size, nbytes=sizes, seconds=tuple(seconds)))
    return found


def _pass_on(data: Tensor, world: World) -> None:
    """From the first rank to the second; the others look on."""
    if world.rank == 0:
        dist.send(data, 1)
    elif world.rank == 1:
        dist.recv(data, 0)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
