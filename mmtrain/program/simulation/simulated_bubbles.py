"""The bubbles of a simulated rank, added up in a few calls of numpy for batch after batch.

Which kind of bubble comes before an action, and which it is itself, depends on the program alone. So `BubblePattern`
asks `BubbleAccount` once for all batches. Numbers are added in the order of the account.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mmtrain.program.ir.actions import Collective, Compute
from mmtrain.program.trace.bubble_accounting import BubbleAccount, Interval, is_forward
from mmtrain.program.trace.timeline import BUBBLE_KINDS, BubbleKind

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BubblePattern:
    """What the bubbles of one sim rank depend on besides times: its tasks that occupy it, in order."""

    tasks: IntArray  # (n,) numbers of the tasks
    actions: tuple[Compute | Collective, ...]  # (n,) what they run
    kinds: IntArray  # (2n,) for each action the kind of bubble before it, then its own; numbers in `BUBBLE_KINDS`
    is_compute: npt.NDArray[np.bool_]  # (n,)
    awaited: tuple[tuple[int, tuple[int, ...]], ...]  # place of an action, and asynchronous collectives it waits for

    @classmethod
    def of_rank(
        cls, numbers: Sequence[int], actions: Sequence[Compute | Collective], awaited: Sequence[tuple[int, ...]]
    ) -> "BubblePattern":
        """Return the pattern of a rank's tasks; awaited: collectives that each of them waits for."""
        account = BubbleAccount(sum(map(is_forward, actions)))
        number_of = {kind: number for number, kind in enumerate(BUBBLE_KINDS)}
        kinds = [number_of[kind] for action in actions for kind in account.next_kinds(action)]
        is_compute = [isinstance(action, Compute) for action in actions]
        places = tuple((place, collectives) for place, collectives in enumerate(awaited) if collectives)
        return cls(
            np.array(numbers, dtype=np.int64),
            tuple(actions),
            np.array(kinds, dtype=np.int64),
            np.array(is_compute, dtype=np.bool_),
            places,
        )

    def bubbles(
        self, started: FloatArray, ended: FloatArray, tp_wait_s: FloatArray | None, step_time_s: float
    ) -> dict[BubbleKind, float]:
        """Return the idle seconds of the rank by kind.

        started, ended: seconds by task of the graph. tp_wait_s: the same for what passes wait inside their layers;
        None where no unit has tp.
        """
        start_s, duration_s = started[self.tasks], ended[self.tasks] - started[self.tasks]
        clock = np.concatenate([[0.0], start_s + duration_s])
        account = BubbleAccount(0)
        for place, collectives in self.awaited:
            account.clock = float(clock[place])
            intervals: list[Interval] = [(float(started[c]), float(ended[c])) for c in collectives]
            account.wait_for(self.actions[place], intervals, float(start_s[place]))
            clock[place] = account.clock
        own_s = np.where(self.is_compute, 0.0 if tp_wait_s is None else tp_wait_s[self.tasks], duration_s)
        seconds = np.stack([start_s - clock[:-1], own_s], axis=1).ravel()
        totals = np.bincount(self.kinds, seconds, len(BUBBLE_KINDS)).tolist()
        bubbles = {kind: total + account.bubbles[kind] for kind, total in zip(BUBBLE_KINDS, totals, strict=True)}
        bubbles["imbalance"] += step_time_s - float(clock[-1])
        return bubbles
