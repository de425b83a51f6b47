"""A table of measured costs: what it predicts, what it rejects, and what is modelled in its place."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mmtrain.costs import AnalyticCosts, CostTable, GroupLayout, MeasuredCosts, TokenLoad, preset
from mmtrain.costs.block_arithmetic import mixer_arithmetic
from mmtrain.costs.choose import layers_without_entry
from mmtrain.costs.cost_model import ComputeKind, LayerWork
from mmtrain.costs.cost_table import LayerEntry, LayerSample, MessageEntry, layer_fields
from mmtrain.costs.measured_costs import Curve, interpolation_errors
from mmtrain.errors import PlanError
from mmtrain.models.shapes.layer_shape import LoraShape
from mmtrain.models.shapes.model_shape import LayerShape
from tests.models.factory import settings, shape_of

MODEL = AnalyticCosts(preset("cpu-core"), "fp32")
BLOCK = next(layer for layer in shape_of(settings()).unit("llm").layers if layer.kind == "decoder_block")
SECONDS = {"forward": 1e-5, "recompute": 2e-5, "backward": 3e-5, "backward_weight": 4e-5, "backward_input": 5e-5}


def _load(*lengths: int) -> TokenLoad:
    return TokenLoad.of(np.array(lengths))


def _sample(load: TokenLoad, factor: float) -> LayerSample:
    seconds = {name: value * load.tokens * factor for name, value in SECONDS.items()}
    return LayerSample(
        tokens=load.tokens,
        sum_sq=load.sum_sq,
        max_len=load.max_len,
        num_sequences=load.num_sequences,
        seconds=seconds,
        activation_bytes=1000 * load.tokens,
    )


def _table(layer: LayerShape = BLOCK, factor: float = 1.0, **changes: object) -> CostTable:
    entry = LayerEntry(
        layer=layer_fields(layer), tp=1, samples=tuple(_sample(_load(n), factor) for n in (64, 128, 256, 512))
    )
    messages = (
        MessageEntry(kind="p2p", size=2, nbytes=(1000, 100_000), seconds=(1e-4, 1e-3)),
        MessageEntry(kind="all_reduce", size=2, nbytes=(1000, 100_000), seconds=(2e-4, 3e-3)),
    )
    fields = {
        "hardware": "cpu-core", "device": "one core", "precision": "fp32", "software": {"torch": "2"},
        "date": "2026-11-21", "layers": (entry,), "messages": messages,
    }  # fmt: skip
    return CostTable.model_validate({**fields, **changes})


@given(
    st.lists(st.floats(1e-3, 10.0), min_size=4, max_size=4),
    st.floats(0, 1e-4),
    st.floats(0, 1e-2),
    st.integers(0, 1000),
)
def test_a_curve_recovers_the_formula_behind_its_samples(
    base: list[float], pair: float, sequence: float, seed: int
) -> None:
    nodes = np.array([64.0, 128.0, 256.0, 512.0])

    def formula(load: TokenLoad) -> float:
        by_tokens = float(np.interp(load.tokens, nodes, np.cumsum(base)))
        return by_tokens + pair * load.sum_sq + sequence * load.num_sequences

    loads = [_load(*lengths) for n in (64, 128, 256, 512) for lengths in ([n], [n // 4] * 4, [n // 2, n // 4, n // 4])]
    curve = Curve.fit(loads, [formula(load) for load in loads])
    rng = np.random.default_rng(seed)
    for load in [_load(*rng.integers(8, 60, rng.integers(2, 8))) for _ in range(5)]:
        if load.tokens >= 64:
            assert curve.at(load) == pytest.approx(formula(load), rel=1e-4, abs=1e-6)


def test_similar_loads_share_a_node_and_no_term_is_negative() -> None:
    loads = [_load(100), _load(*[25] * 4, 3), _load(400), _load(*[100] * 4, 10)]
    curve = Curve.fit(loads, [1.0, 0.5, 4.0, 2.0])
    assert curve.tokens.tolist() == [103.0, 410.0]
    assert curve.per_pair > 0
    assert curve.per_sequence >= 0
    assert curve.at(_load(1)) >= 0
    assert Curve.fit([_load(10)], [1.0]).at(_load(20)) == pytest.approx(2.0)


def test_seconds_are_those_of_the_needed_gradients() -> None:
    costs = MeasuredCosts(_table(), MODEL)
    load = _load(200)
    frozen = replace(BLOCK, trainable=False)
    for layer, kind, input_grad, name in (
        (BLOCK, "forward", True, "forward"),
        (BLOCK, "recompute", True, "recompute"),
        (BLOCK, "backward", True, "backward"),
        (BLOCK, "backward", False, "backward_weight"),
        (frozen, "backward", True, "backward_input"),
        (frozen, "forward", True, "forward"),
    ):
        seconds = costs.seconds(LayerWork(layer, 1, load, kind, input_grad=input_grad))  # type: ignore[arg-type]
        assert seconds == pytest.approx(200 * SECONDS[name]), name
    assert costs.seconds(LayerWork(frozen, 1, load, "backward", input_grad=False)) == 0
    assert costs.seconds(LayerWork(BLOCK, 1, _load(), "forward")) == 0
    assert costs.activation_bytes(BLOCK, 1, load, False) == 200_000
    assert costs.activation_bytes(BLOCK, 1, load, True) == MODEL.activation_bytes(BLOCK, 1, load, True)
    assert costs.source == "measured: one core, 2026-11-21"


def test_seconds_of_a_block_with_windows_grow_with_the_pairs_inside_them() -> None:
    """Fit on sequences little longer than the window, and ask for one that is much longer."""
    windowed = replace(BLOCK, mixer=replace(BLOCK.attention, window=32))

    def seconds(load: TokenLoad) -> float:
        return 1e-5 * load.tokens + 1e-7 * mixer_arithmetic(windowed).query_key_pairs(load)

    loads = [_load(*[length] * (n // length)) for n in (64, 128, 256, 1024) for length in (16, 64)]
    samples = [_sample(load, 1.0) for load in loads]
    samples = [s.model_copy(update={"seconds": dict.fromkeys(SECONDS, seconds(s.load))}) for s in samples]
    entry = LayerEntry(layer=layer_fields(windowed), tp=1, samples=tuple(samples))
    costs = MeasuredCosts(_table().model_copy(update={"layers": (entry,)}), MODEL)
    for load in (_load(1024), _load(600, 20, 20), _load(100, 60)):
        assert costs.seconds(LayerWork(windowed, 1, load, "forward")) == pytest.approx(seconds(load), rel=1e-6)


def test_the_source_names_what_was_modelled_or_extrapolated() -> None:
    costs = MeasuredCosts(_table(), MODEL)
    load = _load(200)
    assert costs.seconds(LayerWork(BLOCK, 2, load, "forward")) == MODEL.seconds(LayerWork(BLOCK, 2, load, "forward"))
    costs.seconds(LayerWork(BLOCK, 1, _load(4096), "forward"))
    assert "modelled (cpu-core): decoder_block tp2" in costs.source
    assert "extrapolated: decoder_block tp1 beyond 64 to 512 tokens" in costs.source


def test_what_compute_loses_beside_collectives_is_interpolated_where_it_was_measured() -> None:
    reduce = MessageEntry(
        kind="all_reduce", size=2, nbytes=(1000, 3000), seconds=(1e-3, 3e-3), overlap_slowdown=(0.2, 0.6)
    )
    costs = MeasuredCosts(_table(messages=(reduce,)), MODEL)
    pair = GroupLayout(2)
    assert costs.overlap_slowdown("all_reduce", 2000, pair) == pytest.approx(0.4)
    assert costs.overlap_slowdown("all_reduce", 9000, pair) == pytest.approx(0.6)
    assert costs.overlap_slowdown("all_gather", 2000, pair) == MODEL.hardware.overlap_slowdown == 1.0
    assert MeasuredCosts(_table(), MODEL).overlap_slowdown("all_reduce", 2000, pair) == 1.0


def test_messages_are_interpolated_and_large_ones_go_by_bandwidth() -> None:
    costs = MeasuredCosts(_table(), MODEL)
    assert costs.transfer(1000, same_node=True) == pytest.approx(1e-4)
    assert costs.transfer(1_000_000, same_node=True) == pytest.approx(1e-2)
    assert costs.transfer(1000, same_node=False) == MODEL.transfer(1000, False)
    assert costs.collective("all_reduce", 1000, GroupLayout(2)) == pytest.approx(2e-4)
    assert costs.collective("all_reduce", 1000, GroupLayout(4)) == MODEL.collective("all_reduce", 1000, GroupLayout(4))
    assert costs.collective("all_reduce", 1000, GroupLayout(1)) == 0


def _all_to_all(size: int, nodes: int, seconds_per_byte: float) -> MessageEntry:
    """Return an entry of which every byte of a rank's tensor takes so long, from 10 bytes on."""
    nbytes = (10, 10_000)
    return MessageEntry(
        kind="all_to_all",
        size=size,
        nodes=nodes,
        nbytes=nbytes,
        seconds=tuple(seconds_per_byte * number for number in nbytes),
    )


def test_an_all_to_all_takes_as_long_as_an_even_one_in_which_ranks_move_as_much_as_the_fullest() -> None:
    """Of 8 ranks on two nodes, each sends 3 of 8 parts on its node and 4 of 8 to the other one."""
    entries = (_all_to_all(4, 1, 1e-6), _all_to_all(8, 2, 1e-5))
    costs = MeasuredCosts(_table(messages=entries, message_scale=2.0), MODEL)
    one_node, two_nodes = GroupLayout(4), GroupLayout(8, 2)
    assert costs.all_to_all(300, 0, one_node) == pytest.approx(2 * 400e-6)
    assert costs.all_to_all(300, 400, two_nodes) == pytest.approx(2 * 800e-5)
    assert costs.all_to_all(30_000, 400, two_nodes) == pytest.approx(2 * 40_000e-6)  # those of a node take longer
    assert costs.all_to_all(3, 0, two_nodes) == pytest.approx(2 * 10e-5), "no less than the smallest that was measured"
    assert not costs.replaced
    assert "all-to-all" not in costs.source


def test_all_to_alls_that_a_table_lacks_are_priced_by_messages_and_the_source_says_so() -> None:
    """A table from before all-to-alls were measured has none of them."""
    costs = MeasuredCosts(_table(), MODEL)
    assert costs.all_to_all(1000, 0, GroupLayout(4)) == costs.transfer(1000, same_node=True) == pytest.approx(1e-4)
    between_nodes = costs.all_to_all(0, 1000, GroupLayout(8, 2))
    assert between_nodes == MODEL.transfer(1000, same_node=False) == MODEL.all_to_all(0, 1000, GroupLayout(8, 2))
    assert costs.all_to_all(1000, 1000, GroupLayout(3, 2)) >= costs.transfer(1000, same_node=True)  # unevenly spread
    named = "all-to-alls of 2, 3, 4, 8 ranks, which the table lacks, by messages between two ranks; `mmtrain profile`"
    assert named in costs.source


def test_errors_are_relative_to_the_measurement() -> None:
    [entry] = _table().layers
    assert interpolation_errors(entry, [_sample(_load(300), 1.25)]) == pytest.approx([0.2, 0.2])


def test_a_table_reads_back_and_merges(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    table = _table()
    table.save(path)
    assert CostTable.load(path) == table
    other = replace(BLOCK, mlp=replace(BLOCK.dense_mlp, ffn=2 * BLOCK.dense_mlp.ffn))
    merged = table.merged(_table(other)).merged(_table(BLOCK, 2.0))
    assert len(merged.layers) == 2
    assert MeasuredCosts(merged, MODEL).seconds(LayerWork(BLOCK, 1, _load(64), "forward")) == pytest.approx(128e-5)
    assert len(merged.messages) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"device": "another"}, "device"), ({"precision": "bf16"}, "precision"), ({"software": {}}, "software")],
)
def test_tables_of_different_hardware_do_not_mix(changes: dict[str, object], named: str) -> None:
    with pytest.raises(PlanError, match=f"was measured with {named} "):
        _table().merged(_table(**changes))


def test_files_that_are_no_tables_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cluster\.costs: .*no such file; make it with `mmtrain profile"):
        CostTable.load(tmp_path / "none.json")
    (tmp_path / "wrong.json").write_text('{"version": 2}')
    with pytest.raises(PlanError, match=r"wrong\.json: the cost table is of format 2, written by an unknown version"):
        CostTable.load(tmp_path / "wrong.json")
    (tmp_path / "wrong.json").write_text('{"version": 1}')
    with pytest.raises(PlanError, match="is no cost table of version 1: hardware"):
        CostTable.load(tmp_path / "wrong.json")


def test_freezing_does_not_make_another_layer() -> None:
    assert layer_fields(BLOCK) == layer_fields(replace(BLOCK, trainable=False, frozen=frozenset({"x"})))
    assert layer_fields(BLOCK) != layer_fields(
        replace(BLOCK, mlp=replace(BLOCK.dense_mlp, ffn=BLOCK.dense_mlp.ffn + 1))
    )


def test_an_activation_function_that_runs_again_is_modelled_beside_what_was_measured() -> None:
    costs, load, again = MeasuredCosts(_table(), MODEL), _load(200), replace(BLOCK, recomputes_activation=True)
    backward_s, recompute_s, forward_s = (
        costs.seconds(LayerWork(again, 1, load, kind)) - costs.seconds(LayerWork(BLOCK, 1, load, kind))
        for kind in ("backward", "recompute", "forward")
    )
    assert backward_s == pytest.approx(-recompute_s)  # a layer that is recomputed whole does not run it a third time
    assert backward_s > forward_s == 0
    output_bytes = 200 * BLOCK.dense_mlp.ffn * MODEL.element_bytes
    assert costs.activation_bytes(again, 1, load, False) == costs.activation_bytes(BLOCK, 1, load, False) - output_bytes
    adapted = LoraShape(2, 1.0, ("mlp.linear_fc2",))  # whose input is kept although the weights are frozen
    for part in ({"trains_adapters_only": True}, {"trains_adapters_only": True, "lora": adapted}):
        kept, kept_again = (MODEL.activation_bytes(replace(layer, **part), 1, load, False) for layer in (BLOCK, again))
        assert kept - kept_again == (output_bytes if "lora" in part else 0)
    assert costs.source == "measured: one core, 2026-11-21"


def test_an_optimizer_step_is_on_a_line_through_the_measurements() -> None:
    points = [{"parameters": n, "seconds": 1e-3 + 2e-9 * n} for n in (1000, 50_000, 10**6)]
    costs = MeasuredCosts(_table(optimizer=points), MODEL)
    assert costs.optimizer(500_000) == pytest.approx(2e-3)
    assert costs.optimizer(0) == 0.0
    single = MeasuredCosts(_table(optimizer=points[:1]), MODEL)
    assert single.optimizer(2000) == pytest.approx(2 * points[0]["seconds"])
    assert MeasuredCosts(_table(), MODEL).optimizer(1000) == MODEL.optimizer(1000) > 0
    merged = _table(optimizer=points[:2]).merged(_table(optimizer=[{"parameters": 1000, "seconds": 1.0}]))
    assert merged.optimizer[0].seconds == 1.0


_SAMPLE = ("layers", 0, "samples", 1)
_LAYER = layer_fields(BLOCK)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ((*_SAMPLE, "seconds", "forward"), -1.0, r"seconds.forward \(decoder_block tp1, 128 tokens\): .*found -1"),
        ((*_SAMPLE, "seconds", "forward"), 0.0, r"samples.1 \(.*128 tokens\): a forward of 128 tokens in 0 s"),
        ((*_SAMPLE, "seconds", "backward"), float("nan"), r"seconds.backward \(.*: .*finite number \(found nan\)"),
        ((*_SAMPLE, "seconds"), {"forward": 1.0}, "lacks recompute, backward at 128 tokens"),
        ((*_SAMPLE, "seconds"), {**SECONDS, "sideways": 1.0}, "sideways.*: Input should be 'forward'"),
        (("layers", 0, "samples"), [], r"layers.0.samples \(decoder_block tp1\): "),
        ((*_SAMPLE, "num_sequences"), 0, "no such load: 128 tokens in 0 sequences"),
        ((*_SAMPLE, "max_len"), 16, "max_len must be at most tokens and at least"),
        ((*_SAMPLE, "sum_sq"), 7, "sum of squares 7; sum_sq must be at least"),
        ((*_SAMPLE, "tokens"), "many", r"tokens \(.*: .*valid integer.*found many"),
        (("layers", 0, "layer"), {**_LAYER, "hiden": 64}, "hiden=64 is no field of a layer; did you mean hidden"),
        (("layers", 0, "layer"), {**_LAYER, "kind": "mixer"}, "kind 'mixer' is no kind of layer; allowed: patch_"),
        (("layers", 0, "layer"), {**_LAYER, "heads": -2}, "heads must be a whole number and not negative, found -2"),
        (("layers", 0, "layer"), {**_LAYER, "gated": 1}, "gated must be true or false, found 1"),
        (("messages", 0, "seconds", 0), float("inf"), r"messages.0.seconds.0 \(p2p of 2 ranks\): .*finite"),
        (("messages", 0, "nbytes"), [7, 7], "p2p needs ascending nbytes"),
        (("messages", 0, "nbytes", 0), 0, "nbytes.0 .*greater than 0 .found 0"),
        (("messages", 0, "size"), 4, "p2p: a message has 2 ranks, found size 4"),
        (("messages", 0, "overlap_slowdown"), [0.5, 0.5], "p2p: overlap_slowdown has 2 shares; .* a message has none"),
        (("messages", 2, "seconds"), [1e-5], r"messages.2 .all_to_all of 4 ranks.: .*needs ascending nbytes, and one"),
        (("messages", 2, "seconds", 1), -1.0, r"seconds.1 .all_to_all of 4 ranks.: .*greater than 0 .found -1"),
        (("messages", 2, "nodes"), 3, "all_to_all: 4 ranks cannot be spread evenly over 3 nodes"),
        (("messages", 2, "kind"), "all_to_some", "messages.2.kind .*Input should be 'p2p'.*found all_to_some"),
        (("messages", 1, "overlap_slowdown"), [0.5], "all_reduce: overlap_slowdown has 1 shares; .* each of its 2"),
        (("messages", 1, "overlap_slowdown"), [0.5, 1.5], "overlap_slowdown.1 .*less than or equal to 1"),
        (("layer_scales",), [{"layer": _LAYER, "forward": 0.0}], "layer_scales.0.forward .*greater than 0"),
        (("held_out_error",), float("nan"), "held_out_error: .*finite"),
        (("software",), None, "software: .*object .found null"),
    ],
)
def test_the_message_names_what_is_wrong_and_where(
    tmp_path: Path, where: tuple[str | int, ...], value: object, message: str
) -> None:
    table = _table()
    table = table.model_copy(update={"messages": (*table.messages, _all_to_all(4, 1, 1e-6))})
    content = table.model_dump(mode="json")
    parent = content
    for key in where[:-1]:
        parent = parent[key]  # type: ignore[index]
    parent[where[-1]] = value  # type: ignore[index]
    assert "mmtrain profile" in _refusal(tmp_path, content, message)


@pytest.mark.parametrize(
    ("room", "message"),
    [
        ("layers", "layers holds causal=True,.* at tp 1 twice"),
        ("messages", "messages holds p2p of 2 ranks on 1 nodes twice"),
        ("optimizer", "optimizer holds 1000 parameters twice"),
        ("layer_scales", "layer_scales holds .*kind=decoder_block.* twice"),
    ],
)
def test_two_entries_for_one_thing_contradict_each_other(tmp_path: Path, room: str, message: str) -> None:
    table = _table(optimizer=[{"parameters": 1000, "seconds": 1.0}], layer_scales=[{"layer": _LAYER}])
    content = table.model_dump(mode="json")
    content[room].append(content[room][0])
    _refusal(tmp_path, content, message)


def test_samples_of_a_layer_state_the_same_passes_and_agree_about_a_load(tmp_path: Path) -> None:
    """A pass that only later samples lack was once found while planning, as a KeyError."""
    partial = _table().model_dump(mode="json")
    del partial["layers"][0]["samples"][2]["seconds"]["backward_weight"]
    _refusal(tmp_path, partial, "backward_weight is stated at one of 64 and 256 tokens only")

    contradictory = _table().model_dump(mode="json")
    samples = contradictory["layers"][0]["samples"]
    samples.append(json.loads(json.dumps(samples[0])))
    assert CostTable.model_validate(contradictory)
    samples[-1]["seconds"]["forward"] *= 20
    _refusal(
        tmp_path, contradictory, r"same load \(64 tokens in 1 sequences\): its forward takes 0.00064 s and 0.0128 s"
    )


def test_the_message_counts_further_errors_and_damaged_files_are_named(tmp_path: Path) -> None:
    content = _table().model_dump(mode="json")
    for message in content["messages"]:
        message["seconds"] = [-1.0, -1.0]
    _refusal(tmp_path, content, "messages.0.seconds.0 .*found -1.0.; 3 more errors in this file")
    (tmp_path / "half.json").write_text(json.dumps(content)[:100])
    with pytest.raises(PlanError, match="the file: Invalid JSON"):
        CostTable.load(tmp_path / "half.json")


def test_a_layer_that_states_a_default_is_the_same_layer() -> None:
    entry = _table().layers[0].model_dump(mode="json")
    entry["layer"]["window"] = 0
    costs = MeasuredCosts(_table(layers=[entry]), MODEL)
    assert costs.seconds(LayerWork(BLOCK, 1, _load(64), "forward")) == pytest.approx(64e-5)
    assert not costs.missing


def test_layers_of_a_model_that_a_table_does_not_hold_are_named() -> None:
    shape = shape_of(settings())
    costs = MeasuredCosts(_table(), MODEL)
    assert layers_without_entry(costs, shape) == ["vision: patch_embed, vit_block, projector", "llm: embedding, head"]
    assert layers_without_entry(MeasuredCosts(_table(layers=()), MODEL), shape) == []  # a table of messages alone
    assert layers_without_entry(MODEL, shape) == []


def _refusal(folder: Path, content: dict[str, Any], message: str) -> str:
    """Return the error that a table with such a content raises."""
    path = folder / "costs.json"
    path.write_text(json.dumps(content))
    with pytest.raises(PlanError, match=message) as caught:
        CostTable.load(path)
    return str(caught.value)


def test_preparing_a_token_costs_time_where_it_enters_its_unit() -> None:
    embedding = shape_of(settings()).unit("llm").layers[0]
    with_loading = {"loading": [{"layer": "embedding", "token_s": 2e-6}]}
    costs, without = (MeasuredCosts(_table(embedding, **fields), MODEL) for fields in (with_loading, {}))

    def added(layer: LayerShape, kind: ComputeKind) -> float:
        work = LayerWork(layer, 1, _load(100, 50), kind)
        return costs.seconds(work) - without.seconds(work)

    assert added(embedding, "forward") == pytest.approx(150 * 2e-6)
    assert added(embedding, "backward") == added(embedding, "recompute") == 0
    assert added(BLOCK, "forward") == 0


def test_a_newer_table_replaces_what_preparing_tokens_takes_by_their_layer() -> None:
    older = _table(loading=[{"layer": "embedding", "token_s": 2e-6}, {"layer": "patch_embed", "token_s": 3e-6}])
    newer = _table(loading=[{"layer": "embedding", "token_s": 4e-6}])
    assert older.merged(newer).loading_by_kind == {"embedding": 4e-6, "patch_embed": 3e-6}
    with pytest.raises(ValidationError, match="loading"):
        _table(loading=[{"layer": "embedding", "token_s": 2e-6}] * 2)
