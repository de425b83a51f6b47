"""The process groups of one unit on this rank, in the form that Megatron-core's parts take them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import HashStore


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of one unit that this rank belongs to. Each may have a single member.

    torch orders a group's members by global rank, whatever order it is given, so a TP group's ranks must ascend.
    """

    tp: dist.ProcessGroup  # ranks that share one stage of one replica
    dp: dist.ProcessGroup  # ranks that hold the same shard of the same stage
    pp: dist.ProcessGroup  # ranks that hold the stages of one replica, same shard

    @classmethod
    def single(cls) -> "ParallelGroups":
        """Groups for a unit that this rank holds alone.

        Without torch.distributed, a one-process world over gloo is started first: Megatron-core's layers ask for
        the size of real process groups even when nothing is parallel.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        alone = _alone()
        return cls(tp=alone, dp=alone, pp=alone)

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.tp.size()

    @property
    def tp_rank(self) -> int:
        """This rank's place among the tensor-parallel ranks."""
        return self.tp.rank()

    @property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.dp.size()

    @property
    def dp_rank(self) -> int:
        """The replica this rank holds."""
        return self.dp.rank()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        if dist.get_backend(self.tp) == "nccl":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def collection(self) -> ProcessGroupCollection:
        """Give Megatron-core every group it may ask for, so that it creates none.

        Groups it creates itself are created in an order that differs between ranks of different units, which hangs.
        """
        alone = next((g for g in (self.tp, self.dp, self.pp) if g.size() == 1), None) or _alone()
        return ProcessGroupCollection(
            tp=self.tp,
            dp=self.dp,
            pp=self.pp,
            mp=None,  # gradient norms are ours
            cp=alone,
            ep=alone,
            embd=None,  # and so are tied embeddings
            pos_embd=None,
            tp_cp=self.tp,
            dp_cp=self.dp,
            intra_dp_cp=self.dp,
            tp_ep_pp=None,
            expt_tp=self.tp,
            expt_dp=self.dp,
            intra_expt_dp=self.dp,
            intra_dist_opt=self.dp,
        )


@contextmanager
def tp_group_scope(groups: ParallelGroups) -> Iterator[None]:
    """Make `groups.tp` the tensor-parallel group of Megatron-core's globals while a unit computes.

    Its vocabulary-parallel cross-entropy and a few others read the global instead of taking a group, and one process
    may hold several units. The other globals stay unset on purpose: they would make Megatron-core believe that it is
    initialised as a whole.
    """
    before = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = groups.tp
    try:
        yield
    finally:
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = before


def _alone() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return group
