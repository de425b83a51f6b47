"""The master test over sampled combinations of all settings; see `tests.flow.cells`."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet
from hypothesis import given, settings

from tests.flow.cells import (
    ADAPTERS,
    CELLS,
    ENCODERS,
    FROZEN,
    KIND_CELLS,
    LLM_KINDS,
    PLACEMENTS,
    PLAIN,
    QUICK_CELLS,
    QUICK_CELLS_PER_PLACEMENT,
    QUICK_KIND_CELLS,
    RECOMPUTED,
    VISION_KINDS,
    Cell,
    Placement,
    cells,
    sample_cells,
)
from tests.flow.equality import assert_equals_one_process
from tests.tiers import mostly_long

NUM_SAMPLED_CELLS = 20  # of each placement, about a second each
# Every value of every axis, all of which `CELLS` must show.
AXES: dict[str, set[object]] = {
    "placement": set(PLACEMENTS),
    "encoders": set(ENCODERS),
    "texts between": {False, True},
    "frozen": set(FROZEN),
    "recompute": set(RECOMPUTED),
    "sharded optimizer": {False, True},
    "dp ratio": {"1:1", "1:2", "2:1", "2:3", "3:2", "4:1"},
    "llm dp": {1, 2, 3},
    "llm n": {1, 2, 3, 4},
    "llm cp": {(1, "ulysses"), *product((2, 4), ("ulysses", "ring"))},
    "cut sequences": {"auto", "even"},
    "microbatches": {"equal", "equal/merged", "equal/split"},
    "vision tp": {(1, False), (2, False), (2, True)},
    "audio tp": {(1, False), (2, False), (2, True)},
    "fine tp": {(1, False), (2, False), (2, True)},
    "llm tp": {(1, False), (2, False), (2, True)},
    "vision pp": {1, 2, 4},
    "audio pp": {1, 2, 4},
    "fine pp": {1, 2, 4},
    "llm pp": {1, 2, 4},
    "vision vpp": {1, 2},
    "audio vpp": {1, 2},
    "fine vpp": {1, 2},
    "llm vpp": {1, 2},
}


def test_the_cells_show_every_value_of_every_axis() -> None:
    assert len(set(CELLS)) == len(CELLS)
    assert set(Counter(cell.placement for cell in QUICK_CELLS).values()) == {QUICK_CELLS_PER_PLACEMENT}
    assert max(cell.num_ranks for cell in CELLS) <= 8
    shown = {item for cell in CELLS for item in cell.axes.items()}
    assert {(axis, value) for axis, values in AXES.items() for value in values} - shown == set()


def test_the_cells_show_every_kind_of_blocks_with_every_placement_and_way_to_divide_it() -> None:
    shown = {(kind, value) for cell in KIND_CELLS for kind in cell.kinds.items() for value in cell.axes.items()}
    kinds: list[tuple[str, object]] = [("llm kind", kind) for kind in LLM_KINDS if kind != PLAIN]
    kinds += [("vision kind", kind) for kind in VISION_KINDS if kind != PLAIN]
    ways = {axis: AXES[axis] for axis in ("placement", "recompute", "texts between")}
    for unit in ("llm", "vision"):
        ways |= {f"{unit} {degree}": AXES[f"{unit} {degree}"] for degree in ("tp", "vpp")}
        ways[f"{unit} pp"] = {1, 2}
    wanted = {(axis, value) for axis, values in ways.items() for value in values}
    assert {(kind, way) for kind in kinds for way in wanted} - shown == set()


@pytest.mark.parametrize(
    "cell",
    [
        *(pytest.param(cell, id=str(cell)) for cell in (*QUICK_CELLS, *QUICK_KIND_CELLS)),
        *(
            pytest.param(cell, id=str(cell), marks=pytest.mark.slow)
            for cell in (*CELLS[len(QUICK_CELLS) :], *KIND_CELLS)
        ),
    ],
)
def test_any_cell_computes_what_one_process_does(cell: Cell) -> None:
    assert_equals_one_process(cell.recipe(), cell.plan(), cell.texts_between)


def _tensor_parallel_cells() -> list[Cell]:
    """Return two tensor-parallel cells of each placement: one without sequence parallelism, one with it."""
    cells_of_all = []
    for placement in PLACEMENTS:
        chosen: dict[bool, Cell] = {}
        for cell in sample_cells(placement, 40):
            split = {size.sp for _, size in cell.sizes if size.tp > 1}
            if len(split) == 1:
                chosen.setdefault(split.pop(), cell)
        assert chosen.keys() == {False, True}
        cells_of_all += chosen.values()
    return cells_of_all


def _long_cells(**changes: Any) -> list[ParameterSet]:
    """Return the tensor-parallel cells with these changes; every third is in the slow tier."""
    return mostly_long((replace(cell, **changes) for cell in _tensor_parallel_cells()), every=3)


@pytest.mark.parametrize("cell", _long_cells(frozen=ADAPTERS), ids=str)
def test_adapters_train_on_any_mesh_as_in_one_process(cell: Cell) -> None:
    assert_equals_one_process(cell.recipe(), cell.plan(), cell.texts_between)


@pytest.mark.parametrize("cell", _long_cells(tp_chunks=3), ids=str)
def test_communication_in_chunks_changes_no_result(cell: Cell) -> None:
    assert_equals_one_process(cell.recipe(), cell.plan(), cell.texts_between)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_more_cells_compute_what_one_process_does(placement: Placement) -> None:
    @settings(max_examples=NUM_SAMPLED_CELLS)
    @given(cells(placement))
    def check(cell: Cell) -> None:
        assert_equals_one_process(cell.recipe(), cell.plan(), cell.texts_between)

    check()
