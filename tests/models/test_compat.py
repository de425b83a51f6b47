import torch
import torch.distributed as dist

from mmtrain.models.megatron import ParallelGroups, optimizer_scope, prepare_megatron
from tests.models.factory import CPU


def test_prepare_megatron_sets_the_device_and_can_be_undone() -> None:
    for _ in range(2):
        prepare_megatron(CPU)
        assert torch.cuda.current_device() == CPU
        torch.cuda.current_stream()  # without CUDA torch itself would raise
    prepare_megatron(torch.device("cuda"))
    assert torch.cuda.current_device.__module__ == "torch.cuda"
    prepare_megatron(CPU)


def test_optimizer_scope_translates_cuda_names_on_a_cpu() -> None:
    tensor = torch.zeros(2)
    with optimizer_scope(CPU):
        assert torch.zeros(1, device="cuda").device == CPU
        assert torch.ones(1, device=torch.device("cuda", 0)).device == CPU
        assert tensor.cuda() is tensor
        assert tensor.type() == "torch.cuda.FloatTensor"
        assert tensor.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert tensor.long().type() == "torch.LongTensor"
        assert tensor.type(torch.float64).dtype == torch.float64
    assert tensor.type() == "torch.FloatTensor"


def test_the_collection_leaves_nothing_for_megatron_to_create() -> None:
    groups = ParallelGroups.single()
    collection = groups.collection()
    for name in ("tp", "dp", "pp", "cp", "ep", "dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "intra_dist_opt"):
        assert isinstance(getattr(collection, name), dist.ProcessGroup), name
    assert groups.device == CPU
