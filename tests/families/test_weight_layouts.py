"""The boxes of a family are a bijection: every element of a tensor is one element of a parameter, and cuts add up."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from mmtrain.families import FAMILIES, Block, ParameterSource, read_model_folder
from mmtrain.families.weight_layouts import flattened, gate_and_up, query_key_value


def _fill(source: ParameterSource, blocks: list[Block], counts: dict[str, np.ndarray], view: np.ndarray) -> None:
    for block in blocks:
        counts[block.tensor][tuple(slice(lo, hi) for lo, hi in block.tensor_box)] += 1
        view[tuple(slice(lo, hi) for lo, hi in block.view_box)] += 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_read_once(family: str, tmp_path: Path) -> None:
    for name, content in FAMILIES[family].tiny.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    settings = read_model_folder(tmp_path).settings
    sources = [*FAMILIES[family].weights(settings), *settings.carried]
    assert len({source.name for source in sources}) == len(sources)
    counts = {name: np.zeros(shape, int) for source in sources for name, shape in source.tensor_shapes().items()}
    for source in sources:
        ends = [tuple(hi for _, hi in block.view_box) for block in source.blocks]
        view = np.zeros(np.max(ends, axis=0), int)
        _fill(source, list(source.blocks), counts, view)
        assert (view == 1).all() or (source.may_be_padded and (view <= 1).all()), source.name
        source.check_cover(view.shape)
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(
    ("source", "dim", "size"),
    [
        (query_key_value("qkv", ("q", "k", "v"), 6, 2, 4, (5,)), 0, 40),
        (gate_and_up("fc1", "gate", "up", (12, 5)), 1, 12),
        (gate_and_up("fc1", "gate", "up", (12, 5)), 2, 5),
        (flattened("conv", "conv", (12, 3, 2, 2)), 0, 12),
    ],
)
@pytest.mark.parametrize("borders", [(0, 3), (1,), (2, 2, 7)])
def test_cuts_read_each_element_on_one_rank(
    source: ParameterSource, dim: int, size: int, borders: tuple[int, ...]
) -> None:
    counts = {name: np.zeros(shape, int) for name, shape in source.tensor_shapes().items()}
    edges = sorted({0, size, *(border % size for border in borders)})
    for lo, hi in itertools.pairwise(edges):
        cut = [block.cut(dim, lo, hi) for block in source.blocks]
        for block in cut:
            if block is None:
                continue
            assert lo <= block.view_box[dim][0] < block.view_box[dim][1] <= hi
            sizes = [math.prod(stop - start for start, stop in box) for box in (block.view_box, block.tensor_box)]
            assert sizes[0] == sizes[1]
            counts[block.tensor][tuple(slice(start, stop) for start, stop in block.tensor_box)] += 1
    assert all((count == 1).all() for count in counts.values())
