"""The process groups of one unit on this rank, in the form that Megatron-core expects."""

import atexit
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch._C._distributed_c10d import HashStore

_SINGLE_MEMBER_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()  # by world


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of one unit that this rank belongs to. Each may have a single member.

    torch orders the members of a group by global rank, in whatever order they are given, so the ranks of a TP group
    must ascend.
    """

    tp: dist.ProcessGroup  # ranks that share one stage of one replica
    dp: dist.ProcessGroup  # ranks that hold the same shard of the same stage, in all replicas
    pp: dist.ProcessGroup  # ranks that hold the same shard of the different stages of one replica
    cp: dist.ProcessGroup | None = None  # those of `dp` whose replicas share the sequences of a microbatch; None: none
    ep: dist.ProcessGroup | None = None  # those of `dp` that hold the experts of a block together; None: no others do
    expert_dp: dist.ProcessGroup | None = None  # with `ep`: those of `dp` that hold the same experts

    @classmethod
    def single(cls) -> "ParallelGroups":
        """Create the groups of a unit that only this rank holds.

        Starts a world of one process over gloo if torch.distributed is not initialized: Megatron-core's layers ask real
        process groups for their size even when nothing is parallel. That world ends with the process.
        """
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
            # Groups that outlive the interpreter make a process abort at its end, now and then (torch 2.13).
            atexit.register(_end_world)
        group = _single_member_group()
        return cls(tp=group, dp=group, pp=group)

    @property
    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups of all axes."""
        optional = (self.cp, self.ep, self.expert_dp)
        return (self.tp, self.dp, self.pp, *(group for group in optional if group is not None))

    @property
    def of_experts(self) -> "ParallelGroups":
        """Return the groups of parameters of experts: their replicas are those that hold the same experts."""
        return self if self.expert_dp is None else replace(self, dp=self.expert_dp)

    @property
    def tp_size(self) -> int:
        """Return the tensor-parallel degree."""
        return self.tp.size()

    @property
    def tp_rank(self) -> int:
        """Return this rank's index in the TP group."""
        return self.tp.rank()

    @property
    def dp_size(self) -> int:
        """Return the number of replicas."""
        return self.dp.size()

    @property
    def dp_rank(self) -> int:
        """Return this rank's index in the data-parallel group."""
        return self.dp.rank()

    @property
    def device(self) -> torch.device:
        """Return the device that this rank computes on."""
        if "nccl" in dist.get_backend(self.tp):  # also beside gloo, as in the default group
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def collection(self) -> ProcessGroupCollection:
        """Give Megatron-core every group that it may ask for, so that it creates none.

        Ranks of different units would create groups in different orders, which hangs.
        """
        single_member_groups = (group for group in self.all if group.size() == 1)
        single = next(single_member_groups, None) or _single_member_group()
        return ProcessGroupCollection(
            tp=self.tp,
            dp=self.dp,
            pp=self.pp,
            mp=None,  # mmtrain computes gradient norms itself
            cp=single,
            ep=single,
            embd=None,  # and reduces the gradients of tied embeddings itself
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


def _single_member_group() -> dist.ProcessGroup:
    """Return the group of this rank alone, made once in a world: each group over gloo has three threads, which poll."""
    world = dist.group.WORLD
    assert world is not None, "the world was started"
    if world not in _SINGLE_MEMBER_GROUPS:
        _SINGLE_MEMBER_GROUPS[world] = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return _SINGLE_MEMBER_GROUPS[world]


def _end_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
