"""Let all ranks that torchrun or SLURM started run plans, while the first one plans: `mmtrain plan --measure`."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from mmtrain.costs.find_hardware import is_same_hardware
from mmtrain.errors import LaunchError, MmtrainError, RunError
from mmtrain.planning.artifact.plan import Plan
from mmtrain.runtime.profiling.measured_turns import LaunchPart, Turns, run_part
from mmtrain.runtime.resilience.failures import lost_peers_named
from mmtrain.runtime.world import Address, World, detect_hardware, join, leave


class LaunchedRanks:
    """The processes that a launcher started. Each runs its rank of a plan in a process beside it.

    So a plan that fails ends that process and not this one, and gives back all its memory and connections. Between
    plans the processes meet to exchange objects, for which they need no GPU.
    """

    def __init__(self, address: Address) -> None:
        """Meet the other ranks. Raises LaunchError where one does not come or has no GPU."""
        self._address = address
        self._num_launches = 0
        self._world = self._meet()
        found = cast(list[str | MmtrainError], self._world.all_gather(_hardware_here()))
        for name in found:
            if isinstance(name, MmtrainError):
                raise name
        self._hardware = cast(list[str], found)

    @property
    def is_first(self) -> bool:
        """True on the rank that plans; the others call `follow`."""
        return self._world.is_first

    @property
    def num_ranks(self) -> int:
        """The number of ranks that were started."""
        return self._address.world_size

    def require_number(self, num_ranks: int | None) -> None:
        """Raise LaunchError if the recipe's `cluster.ranks` are not those that were started."""
        if num_ranks is not None and num_ranks != self.num_ranks:
            raise LaunchError(
                f"--measure: cluster.ranks is {num_ranks}, but {self.num_ranks} processes were started "
                f"({self._address.origin}), and plans run on all of them; start {num_ranks}, or leave cluster.ranks "
                "out to plan for what the launcher starts"
            )

    def require_match(self, plan: Plan) -> None:
        """See `MeasuringRanks`."""
        self.require_number(plan.world_size)
        for rank, name in enumerate(self._hardware):
            if not is_same_hardware(plan.hardware, name):
                raise LaunchError(
                    f"--measure: the plan is for {plan.hardware}, and rank {rank} is {name}; set cluster.hardware to "
                    "what was started, or start the ranks on what is planned for"
                )

    def run(self, turns: Turns) -> Sequence[LaunchPart]:
        """See `MeasuringRanks`. The first rank calls this."""
        with lost_peers_named(self._address):
            self._world.broadcast(turns)
            return self._take_part(turns)

    def follow(self) -> int:
        """Take part in what the first rank runs, until it ends; return the exit code that it ends with."""
        with lost_peers_named(self._address):
            while isinstance(order := self._world.broadcast(None), Turns):
                self._take_part(order)
            leave()
        return cast(int, order)

    def end(self, exit_code: int) -> None:
        """End the other ranks with this exit code. The first rank calls this, also after an error."""
        with suppress(RunError, RuntimeError):  # of ranks that are gone
            self._world.broadcast(exit_code)
        leave()

    def _meet(self) -> World:
        # Planning takes as long as it takes; a rank that dies closes its connections.
        return join(self._address, on_host=True).without_timeout()

    def _take_part(self, turns: Turns) -> Sequence[LaunchPart]:
        """Run this rank's part in a process of its own, and return what all ranks saw."""
        self._num_launches += 1
        meeting = f"{self._address.job}/measured/{self._address.attempt}/{self._num_launches}"
        store, failed = self._world.store, f"{meeting}/failed"
        assert store is not None, "a launcher's single rank starts its own ranks"
        leave()  # its threads would not survive a fork
        address = replace(self._address, job=meeting, has_store=True)
        part = run_part(turns, [address], lambda: store.check([failed]))
        if part.has_failed:
            store.set(failed, "")  # the other ranks may wait for this one in vain
        self._world = self._meet()
        return cast(list[LaunchPart], self._world.all_gather(part))


def _hardware_here() -> str | MmtrainError:
    """Return the preset of this rank's device, or why there is none: all ranks raise it together."""
    try:
        return detect_hardware()
    except MmtrainError as error:
        return error
