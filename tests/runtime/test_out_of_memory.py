import numpy as np
import pytest
import torch

from mmtrain.balance import BatchMeta, ItemTable
from mmtrain.data.loading.payload import PayloadNeed
from mmtrain.program import action_from_text
from mmtrain.runtime.resilience.out_of_memory import (
    InputOf,
    explain_out_of_memory,
    is_out_of_memory,
    predicted_peak_gib,
)


@pytest.mark.parametrize(("rank", "gib"), [(0, 1.5), (1, 2.5), (3, 2.5), (4, None)])
def test_a_rank_is_found_in_a_range(rank: int, gib: float | None) -> None:
    assert predicted_peak_gib(rank, {"0": 1.5, "1-3": 2.5}) == gib


def test_memory_errors_of_device_and_host_are_known() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(host.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("line", ["F llm.0 llm:0.1", "B llm.0 llm:0.1", "PB llm.0 llm:0.1 1:2"])
def test_the_stage_and_the_samples_are_named(line: str) -> None:
    place = np.array([0, 1])
    meta = BatchMeta(0, 0, place, np.array([5, 7]), np.array([5, 7]), np.array([0, 0]), place, {})
    story = explain_out_of_memory(action_from_text(line), meta, ["cat", "dog"], 2**30, None)
    assert story.startswith("out of memory in stage llm.0, microbatch llm:0.1; samples dog (7 LLM tokens); 1.00 GiB")


def test_an_input_without_memory_names_its_units_and_the_samples_of_the_rank() -> None:
    first, second = np.array([0, 0, 1]), np.array([0, 1, 1])
    items = ItemTable(np.array([1, 2]), *([np.array([0, 0])] * 5), np.array([0, 1]), np.array([0, 0]))
    meta = BatchMeta(4, 0, np.arange(3), np.array([5, 7, 9]), np.array([5, 7, 9]), first, second, {"vision": items})
    needs = (PayloadNeed("vision", 0, media=True), PayloadNeed("llm", 1, ids=True))
    text = explain_out_of_memory(InputOf(needs), meta, ["cat", "dog", "owl"], 2**30, 1.5)
    assert text.startswith("out of memory while the step's input of vision, llm was brought to the device")
    assert "; samples dog, owl (16 LLM tokens); 1.50 GiB predicted at most" in text
    assert "train.global_batch" in text
