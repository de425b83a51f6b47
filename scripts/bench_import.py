"""Measure time and host memory of starting from a folder: `python -m scripts.bench_import --gb 2 --tp 2`.

Writes a random Llama of the stated size, in files of one layer each, and lets every tensor-parallel rank fill its
shard of all layers in bf16; with `--stored fp32` also fp32 master weights, as a run in bf16 starts with. Memory is what
a rank allocates beyond its start (RssAnon, sampled), against the bytes that it keeps. Pages of the mapped files are not
counted: the system takes them back when it needs memory.
"""

import ctypes
import gc
import json
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from mmtrain.families import FAMILIES, read_model_folder
from mmtrain.models.build_stage import StageOptions, build_stage
from mmtrain.models.megatron import ParallelGroups, prepare_megatron
from mmtrain.models.optim.parameter_specs import stage_param_specs
from mmtrain.models.shapes.model_shape import build_model_shape
from mmtrain.models.stage.stage_module import StageModule, StageSpec
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.resilience.launch import launch_local
from mmtrain.runtime.world import Address, join, leave
from mmtrain.weights import PretrainedWeights, open_pretrained
from scripts.measurements import Report, arguments, start

CPU = torch.device("cpu")
SAMPLING_INTERVAL_S = 0.002
_STORED_TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
}  # fmt: skip
RECIPE = """
name: bench
model: {{hf: {folder}}}
data: {{sources: [{{path: none.json}}], tokenizer: none.json, seq_len: 64}}
train: {{steps: 1, global_batch: 1, optimizer: {{lr: 1.0e-3}}}}
"""


def main() -> None:
    """Write the model and start the ranks."""
    parser = arguments(__doc__)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the weights")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--stored", choices=["bf16", "fp32"], default="bf16", help="type of the weights in the folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        num_bytes = _write_model(folder, options.gb * 1e9, _STORED_TYPES[options.stored])
        path = Path(parent) / "recipe.yaml"
        path.write_text(RECIPE.format(folder=folder), encoding="utf-8")
        report = start("Pretrained weights", options)
        files = len(list(folder.glob("*.safetensors")))
        report.table(f"{num_bytes / 1e9:.2f} GB in {files} files", "keeps", "allocates", "ratio", "time", "speed")
        launch_local(options.tp, partial(_fill_rank, report, load_recipe(path).recipe))


def _write_model(folder: Path, wanted_bytes: float, dtype: torch.dtype) -> int:
    """Write a folder of at least this size; return the bytes of its weights."""
    folder.mkdir()
    sizes = []
    for layers in (1, 2):
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}), encoding="utf-8")
        sizes.append(dtype.itemsize * sum(torch.Size(shape).numel() for shape in _shapes(folder).values()))
    layers = max(1, round((wanted_bytes - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}), encoding="utf-8")
    files: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in _shapes(folder).items():
        layer = name.split(".")[2] if ".layers." in name else "ends"
        files[f"model-{layer}.safetensors"][name] = shape
    for file, shapes in files.items():
        save_file({name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}, folder / file)
    weight_map = {name: file for file, shapes in files.items() for name in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    settings = read_model_folder(folder).settings
    sources = FAMILIES["llama"].weights(settings)
    return {tensor: shape for source in sources for tensor, shape in source.tensor_shapes().items()}


class _PeakMemory:
    """Samples the memory that this process has allocated, in a thread."""

    def __init__(self) -> None:
        self.start_bytes = self.peak_bytes = _anonymous_bytes()
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_done.wait(SAMPLING_INTERVAL_S):
            self.peak_bytes = max(self.peak_bytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


def _fill_masters(stage: StageModule, weights: PretrainedWeights | None, tp_rank: int, tp: int) -> list[torch.Tensor]:
    """Make the fp32 master weights that the folder has at a higher precision than the stage's parameters."""
    assert weights is not None
    specs = stage_param_specs(stage, stage.unit, tp)
    masters = []
    for name, param in stage.named_parameters():
        master = torch.empty(param.numel(), dtype=torch.float32)
        if weights.fill_master(master, specs[name], tp_rank, tp, 0, param.dtype):
            masters.append(master)
    return masters


def _fill_rank(report: Report, recipe: Recipe, address: Address) -> None:
    torch.set_num_threads(1)
    world = join(address)
    prepare_megatron(CPU)
    groups = replace(ParallelGroups.single(), tp=dist.group.WORLD)
    model = build_model_shape(recipe)
    spec = StageSpec("llm", (0, len(model.unit("llm").layers)))
    # What the first stage of a process imports and caches is no cost of the weights.
    build_stage(recipe.model, model, StageSpec("llm", (1, 2)), groups, StageOptions(torch.bfloat16, CPU, 0))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or memory that is free again would count as allocated at the start
    start_s = time.perf_counter()
    with _PeakMemory() as memory:
        weights = open_pretrained(recipe)
        options = StageOptions(torch.bfloat16, CPU, 0, pretrained=weights)
        stage = build_stage(recipe.model, model, spec, groups, options)
        masters = _fill_masters(stage, weights, world.rank, world.size)
    seconds = time.perf_counter() - start_s
    kept_bytes = sum(param.numel() * param.element_size() for param in (*stage.parameters(), *masters))
    extra_bytes = memory.peak_bytes - memory.start_bytes
    gb = [f"{num_bytes / 1e9:.2f} GB" for num_bytes in (kept_bytes, extra_bytes)]
    figures = [*gb, f"{extra_bytes / kept_bytes:.2f}x", f"{seconds:.1f} s", f"{kept_bytes / seconds / 1e9:.2f} GB/s"]
    for rank, of_rank in enumerate(world.all_gather(figures)):
        if world.is_first:
            report.row(f"rank {rank}", *of_rank)
    leave()


if __name__ == "__main__":
    main()
