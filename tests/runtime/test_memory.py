import pytest
import torch

from mmtrain.runtime.memory import out_of_memory, predicted_for


@pytest.mark.parametrize(("rank", "gib"), [(0, 1.5), (1, 2.5), (3, 2.5), (4, None)])
def test_a_rank_is_found_in_a_range(rank: int, gib: float | None) -> None:
    assert predicted_for(rank, {"0": 1.5, "1-3": 2.5}) == gib


def test_memory_errors_of_device_and_host_are_known() -> None:
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(host.value)
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
