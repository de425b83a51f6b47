"""Make the cost tables that come with the package: `python scripts/make_tables.py cpu-core`, or `h200-141g` on H200.

`cpu-core` holds the demo's layers, measured on two cores of this machine; leave it otherwise idle. `h200-141g` holds
the layers of published models at every tensor-parallel size: measured where enough GPUs are present, else modelled.
Every entry names its source.
"""

import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from mmtrain.costs import AnalyticCosts, CostTable, TokenLoad, preset, preset_for_device
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import LayerEntry, LayerSample, layer_fields, layer_key
from mmtrain.data import build_index
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.models.shapes.model_shape import LayerShape, UnitShape, build_model_shape
from mmtrain.planning.space.constraints import sizes_to_measure
from mmtrain.recipe import Recipe, load_recipe
from mmtrain.runtime.profiling.loading_profiler import measure_loading
from mmtrain.runtime.profiling.probes import make_probes
from mmtrain.runtime.profiling.profile import ProfileRequest, profile

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "mmtrain" / "costs" / "tables"
RANKS_OF_CPU, RANKS_OF_NODE = 2, 8
PUBLISHED = (
    ("internvit-6b", "internlm2-20b"),
    ("internvit-300m", "qwen2-7b"),
    ("internvit-300m", "qwen2-72b"),
    ("internvit-300m", "llama3-8b"),
)
RECIPE = """
name: table
model:
  vision: {{preset: {vision}}}
  llm: {{preset: {llm}}}
data:
  sources: [{{path: none.json}}]
  tokenizer: none.json
  seq_len: 8192
cluster: {{hardware: h200-141g}}
train: {{steps: 1, global_batch: 1, precision: bf16, optimizer: {{lr: 1.0e-4}}}}
"""


def main() -> None:
    [name] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        table = _cpu_core(Path(folder)) if name == "cpu-core" else _published(name, Path(folder))
    table.save(TABLES / f"{name}.json")
    sources = [entry.source for entry in table.layers]
    print(f"{TABLES / name}.json: {sources.count('measured')} layers measured, {sources.count('modelled')} modelled")


def _cpu_core(folder: Path) -> CostTable:
    """Measure the demo's layers on loads of its data."""
    generate_demo(folder, seed=0, train=2000, heldout=10)
    recipe = load_recipe(
        ROOT / "recipes" / "demo.yaml",
        [f"data.sources=[{{path: {folder / 'train.json'}}}]", f"data.tokenizer={folder / 'tokenizer.json'}",
         "data.validation=[]", "train.validate_every=0", "parallel.placement=auto"],
    ).recipe  # fmt: skip
    sizes = sizes_to_measure(recipe, RANKS_OF_CPU)
    index = build_index(recipe)
    measured = profile(ProfileRequest(recipe, "cpu-core", RANKS_OF_CPU, sizes, index.lengths))
    print(f"median error on loads held out: {measured.median_error:.1%}")
    return measured.table.model_copy(update={"loading": measure_loading(recipe, index, RANKS_OF_CPU)})


def _published(hardware: str, folder: Path) -> CostTable:
    """Return layers of published models, measured at the sizes that the GPUs of this machine allow."""
    gpus = torch.cuda.device_count()
    has_hardware = gpus > 0 and preset_for_device(torch.cuda.get_device_name(0)) == hardware
    table = CostTable(
        hardware=hardware,
        device=torch.cuda.get_device_name(0) if has_hardware else f"none: modelled as {hardware}",
        precision="bf16",
        software={"python": platform.python_version(), "torch": torch.__version__},
        date=time.strftime("%Y-%m-%d"),
    )
    for vision, llm in PUBLISHED:
        path = folder / f"{vision}-{llm}.yaml"
        path.write_text(RECIPE.format(vision=vision, llm=llm), encoding="utf-8")
        recipe = load_recipe(path).recipe
        layers = [
            e for u in build_model_shape(recipe).units for tp in (1, 2, 4, 8) for e in modelled(recipe, u, tp, hardware)
        ]
        table = table.merged(table.model_copy(update={"layers": tuple(layers)}))
        if has_hardware:
            sizes = sizes_to_measure(recipe, gpus)
            table = table.merged(profile(ProfileRequest(recipe, hardware, gpus, sizes)).table)
    return table


def modelled(recipe: Recipe, unit: UnitShape, tp: int, hardware: str) -> list[LayerEntry]:
    """Return modelled entries of the unit's distinct layers, if they can be split by `tp`."""
    if tp not in sizes_to_measure(recipe, RANKS_OF_NODE).get(unit.name, ()):
        return []
    costs = AnalyticCosts(preset(hardware), "bf16")
    loads = sorted((probe.load for probe in make_probes(recipe, unit)[0]), key=lambda load: (load.tokens, load.sum_sq))
    layers = {layer_key(layer_fields(layer)): layer for layer in unit.layers}
    return [
        LayerEntry(
            layer=layer_fields(layer),
            tp=tp,
            source="modelled",
            samples=tuple(_sample(costs, replace(layer, trainable=True), tp, load) for load in loads),
        )
        for layer in layers.values()
    ]


def _sample(costs: AnalyticCosts, layer: LayerShape, tp: int, load: TokenLoad) -> LayerSample:
    frozen = replace(layer, trainable=False)
    seconds = {
        "forward": costs.seconds(LayerWork(layer, tp, load, "forward")),
        "recompute": costs.seconds(LayerWork(layer, tp, load, "recompute")),
        "backward": costs.seconds(LayerWork(layer, tp, load, "backward")),
        "backward_weight": costs.seconds(LayerWork(layer, tp, load, "backward", input_grad=False)),
        "backward_input": costs.seconds(LayerWork(frozen, tp, load, "backward")),
    }
    return LayerSample(
        tokens=load.tokens,
        sum_sq=load.sum_sq,
        max_len=load.max_len,
        num_sequences=load.num_sequences,
        seconds={name: float(f"{value:.6g}") for name, value in seconds.items()},
        activation_bytes=costs.activation_bytes(layer, tp, load, False),
    )


if __name__ == "__main__":
    main()
