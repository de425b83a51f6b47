"""The costs that a recipe chooses: modelled from a preset, from a file, or from a table of the package."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mmtrain.costs import AnalyticCosts, CostTable, MeasuredCosts, TokenLoad, costs_for, preset
from mmtrain.costs.choose import is_shipped, machine_for, machine_with_spread
from mmtrain.costs.cost_model import LayerWork
from mmtrain.costs.cost_table import MeasuredSpread
from mmtrain.costs.hardware import Hardware
from mmtrain.costs.time_spread import TimeSpread, expected_maximum
from mmtrain.errors import PlanError
from mmtrain.models.shapes.layer_shape import Attention, DenseMlp
from mmtrain.models.shapes.model_shape import LayerShape
from mmtrain.recipe import load_recipe
from tests.planning import factory

TABLES = Path(__file__).parents[2] / "mmtrain" / "costs" / "tables"


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_every_shipped_table_has_the_name_of_its_hardware(path: Path) -> None:
    table = CostTable.load(path)
    assert table.hardware == path.stem
    costs = costs_for(preset(table.hardware), table.precision, Path(path.stem))
    assert isinstance(costs, MeasuredCosts)
    assert costs.source.startswith(f"{table.provenance}: {table.device}")
    assert 1 in {entry.tp for entry in table.layers}
    entry = table.layers[0]
    layer = entry.shape
    load = entry.samples[-1].load
    assert costs.seconds(LayerWork(layer, entry.tp, load, "forward")) == pytest.approx(
        entry.samples[-1].seconds["forward"], rel=0.25
    )
    assert not costs.missing


def test_the_h200_table_says_what_was_not_measured() -> None:
    table = CostTable.load(TABLES / "h200-141g.json")
    kinds = {(entry.layer["kind"], entry.layer["hidden"], entry.tp) for entry in table.layers}
    for hidden in (8192, 6144, 4096, 3584):  # Qwen2 72B, InternLM2-20B, Llama-3 8B, Qwen2 7B
        assert ("decoder_block", hidden, 4) in kinds
    for hidden in (3200, 1024):  # InternViT-6B and -300M
        assert ("vit_block", hidden, 1) in kinds
    measured = {entry.source for entry in table.layers} != {"modelled"}
    assert measured or table.device.startswith("none: modelled")


def test_a_recipe_states_the_cluster_as_it_is() -> None:
    h100 = preset("h100-80g")
    stated = factory.recipe(
        cluster={
            "ports_per_node": 4,
            "intra_node_gb_per_s": 120,
            "inter_node_gb_per_s": 24,
            "inter_node_latency_us": 40,
            "rail_optimized": True,
        }
    )
    machine = machine_for(stated, "h100-80g")
    assert machine.ports_per_rank == 4 / 8
    assert machine.intra_node == replace(h100.intra_node, bytes_per_s=120e9)
    assert machine.inter_node.bytes_per_s == 24e9
    assert machine.inter_node.latency_s == pytest.approx(40e-6)
    assert machine.inter_node.step_s == pytest.approx(2 * h100.inter_node.step_s), "steps follow the latency"
    assert machine.link(same_node=False).bytes_per_s == 12e9, "two ranks share a port"
    assert (machine.rail_optimized, machine.rail_hop_s) == (True, h100.intra_node.step_s)
    four_ranks = factory.recipe(cluster={"ports_per_node": 4, "ranks_per_node": 4})
    assert machine_for(four_ranks, "h100-80g").ports_per_rank == 1.0
    assert machine_for(factory.recipe(cluster={"ranks_per_node": 4}), "a100-80g-2x200").ports_per_rank == 0.25
    assert machine_for(factory.recipe(), "h100-80g") == h100
    assert machine_for(factory.recipe(cluster={"rail_optimized": False}), "a800-80g-4x200").rail_hop_s == 0.0


def test_the_page_on_planning_shows_a_cluster_that_can_be_stated(tmp_path: Path) -> None:
    """The example of docs/planning.md, planned on the preset that it names: MMScale's network, stated by hand."""
    page = (TABLES.parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    block = page.partition("### The cluster\n")[2].partition("    cluster:\n")[2].partition("\n\n")[0]
    whatif = TABLES.parents[2] / "recipes" / "whatif"
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: {whatif / 'mmscale_7b.yaml'}\ncluster:\n{block}\n", encoding="utf-8")
    recipe = load_recipe(path).recipe
    stated, papers = machine_for(recipe, recipe.cluster.hardware), preset("a800-80g-4x200")
    assert replace(stated, name=papers.name, host_memory_bytes=papers.host_memory_bytes) == papers


def test_an_unknown_table_is_rejected(tmp_path: Path) -> None:
    machine = preset("cpu-core")
    with pytest.raises(PlanError, match=r"cluster.costs: `h200` is not a table .* did you mean `h200-141g`\? Known: "):
        costs_for(machine, "fp32", Path("h200"))
    with pytest.raises(PlanError, match="h200-141g was made for hardware h200-141g, but this is planned for cpu-core"):
        costs_for(machine, "fp32", Path("h200-141g"))
    with pytest.raises(PlanError, match=r"no such file; make it with `mmtrain profile"):
        costs_for(machine, "fp32", tmp_path / "none.json")
    with pytest.raises(PlanError, match=r"made for precision bf16, .* set train.precision to bf16"):
        costs_for(preset("h200-141g"), "fp32", Path("h200-141g"))
    assert isinstance(costs_for(machine, "fp32", None), AnalyticCosts)


def test_a_table_without_an_entry_is_rejected(tmp_path: Path) -> None:
    content = {"hardware": "cpu-core", "device": "x", "precision": "fp32", "software": {}, "date": "2026-11-23"}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(
        PlanError, match=r"costs.json holds no entry \(layers, .* are empty\); measure with `mmtrain prof"
    ):
        costs_for(preset("cpu-core"), "fp32", path)


@pytest.mark.parametrize(
    ("hardware", "device"),
    [("h100-80g", "one core of x"), ("h100-80g", "NVIDIA A100-SXM4-80GB"), ("cpu-core", "NVIDIA H200")],
)
def test_a_table_that_was_measured_on_other_hardware_than_it_states_is_rejected(
    tmp_path: Path, hardware: str, device: str
) -> None:
    path = tmp_path / "costs.json"
    table = CostTable.load(TABLES / "h200-141g.json")
    table.model_copy(update={"hardware": hardware, "device": device}).save(path)
    with pytest.raises(PlanError, match=f"it is for hardware {hardware}, and was measured on `{device}`; make a table"):
        costs_for(preset(hardware), "bf16", path)
    table.model_copy(update={"hardware": hardware, "device": "NVIDIA L40"}).save(path)  # may be the closest preset
    assert isinstance(costs_for(preset(hardware), "bf16", path), MeasuredCosts)


def test_a_bare_word_names_a_shipped_table() -> None:
    assert is_shipped(Path("cpu-core"))
    assert not any(is_shipped(Path(p)) for p in ("costs.json", "/tables/cpu-core", "tables/cpu-core"))


def test_the_source_says_how_to_measure_missing_layers() -> None:
    costs = costs_for(preset("h200-141g"), "bf16", Path("h200-141g"))
    unmeasured = LayerShape("decoder_block", hidden=48, out=48, mixer=Attention(2, 2, 24), mlp=DenseMlp(96))
    assert "mmtrain profile" not in costs.source
    costs.seconds(LayerWork(unmeasured, 2, TokenLoad(10, 100, 10, 1), "forward"))
    assert costs.source.endswith(
        "modelled (h200-141g): decoder_block tp2; `mmtrain profile` on such hardware measures them"
    )


def test_the_spread_is_the_recipes_then_that_of_its_table_then_the_presets(tmp_path: Path) -> None:
    def machine(costs: Path | None = None, **stated: float) -> Hardware:
        cluster = {"time_spread": stated, **({} if costs is None else {"costs": costs})}
        return machine_with_spread(factory.recipe(cluster=cluster), "h100-80g")

    assert machine().time_spread == preset("h100-80g").time_spread == TimeSpread(0.02, 0.01)
    table = CostTable.load(TABLES / "h200-141g.json").model_copy(
        update={"time_spread": MeasuredSpread(ranks=None, layers=0.03)}
    )
    table.save(tmp_path / "costs.json")
    assert machine(tmp_path / "costs.json").time_spread == TimeSpread(0.02, 0.03)
    assert machine(tmp_path / "costs.json", ranks=0.05).time_spread == TimeSpread(0.05, 0.03)
    assert machine(Path("h200-141g"), layers=0.0).time_spread == TimeSpread(0.02, 0.0)


def test_what_a_rank_must_know_of_its_hardware_needs_no_table(tmp_path: Path) -> None:
    """A table may lie on the first node alone, which plans."""
    recipe = factory.recipe(cluster={"costs": tmp_path / "elsewhere.json"})
    assert machine_for(recipe, "h100-80g").memory_bytes == preset("h100-80g").memory_bytes


def test_costs_are_at_the_pace_of_the_slowest_rank() -> None:
    """Measured layers take so many times as long; modelled ones as far as GEMMs and attention decide."""
    machine = preset("h200-141g")
    slow = machine.at_pace_of(64)
    assert slow.slowest_rank_ratio == pytest.approx(1 + 0.02 * expected_maximum(64))
    entry = CostTable.load(TABLES / "h200-141g.json").layers[0]
    work = LayerWork(entry.shape, entry.tp, entry.samples[-1].load, "forward")
    seconds, slow_s = (costs_for(of, "bf16", Path("h200-141g")).seconds(work) for of in (machine, slow))
    assert slow_s == pytest.approx(seconds * slow.slowest_rank_ratio)
    modelled_s, slow_modelled_s = (costs_for(of, "bf16", None).seconds(work) for of in (machine, slow))
    assert modelled_s <= slow_modelled_s <= modelled_s * slow.slowest_rank_ratio
