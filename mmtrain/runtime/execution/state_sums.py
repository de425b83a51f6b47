"""Find bits of weights and optimizer state that changed although nothing should have changed them.

Between two updates nothing writes what a rank holds. So its sum after an update is its sum before the next one, also
where no other rank holds the same. Where others do, the sums of all of them are equal. Both are compared on the device
in every step; the host looks at the outcome now and then.
"""

import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmtrain.models.optim.held_state import BitSums, HeldTensor
from mmtrain.runtime.rendezvous import ranks_text
from mmtrain.runtime.world import World

MAX_TENSORS_NAMED = 5


@dataclass(frozen=True)
class _Finding:
    """What one rank knows of one of its tensors that may be wrong."""

    rank: int
    host: str
    name: str
    updates: tuple[int, int] | None  # since the last check, between which it changed; None: it differs from others
    holders: tuple[int, ...] = ()  # the ranks that should hold the same
    since: int = 0  # the first update since the last check with a difference; 0: it was loaded so
    found_sum: int = 0  # of this rank then


class StateSums:
    """Sums over the bits of all that a rank holds, taken around every update.

    All ranks make one after their weights were loaded, and call `check` together.
    """

    def __init__(self, held: Iterable[HeldTensor], world: World, first_step: int) -> None:
        """Take the first sums, after `first_step` steps."""
        self._world = world
        self.checked_step = first_step  # after which the last check was
        by_change: dict[str, list[HeldTensor]] = {"never": [], "by update": [], "by gather": []}
        for tensor in held:
            by_change[tensor.changes].append(tensor)
        self._frozen = _Watched(by_change["never"], world.device)
        self._updated = _Watched(by_change["by update"], world.device)
        self._gathered = _Watched(by_change["by gather"], world.device)
        self._num_updates = 0  # since the last check
        self._bad_since = torch.zeros_like(self._updated.sums)  # updates until a tensor was found changed, or 0
        self.checked: Mapping[str, int] = {}  # sums of what passed the last check, by name

    def before_update(self) -> None:
        """Compare what this rank holds with what the last update left."""
        self._num_updates += 1
        left = self._updated.sums
        is_bad = (self._updated.sum() != left) & (self._bad_since == 0)
        self._bad_since.masked_fill_(is_bad, self._num_updates)
        self._gathered.remember()

    def after_update(self) -> None:
        """Take the sums of what the update has left."""
        self._updated.remember()

    def check(self, step: int) -> str | None:
        """Return what is wrong after `step` steps, the same on all ranks, or None; waits for the device."""
        bad_since = self._bad_since.tolist()
        frozen_before = self._frozen.sums
        is_frozen_bad = self._frozen.sum() != frozen_before
        findings = [
            self._changed(held, update - 1, update)
            for held, update in zip(self._updated.held, bad_since, strict=True)
            if update
        ]
        findings += [
            self._changed(held, 0, self._num_updates)
            for held, is_bad in zip(self._frozen.held, is_frozen_bad.tolist(), strict=True)
            if is_bad
        ]
        for watched in (self._frozen, self._updated, self._gathered):
            findings += self._differing(watched)
        num_findings = self._world.all_reduce(len(findings))
        last_checked, self.checked_step, self._num_updates = self.checked_step, step, 0
        if not num_findings:
            self.checked = {**self._frozen.by_name(), **self._updated.by_name()}
            return None
        gathered = cast(list[list[_Finding]], self._world.all_gather(findings))
        return describe([finding for of_rank in gathered for finding in of_rank], last_checked)

    def _changed(self, held: HeldTensor, first: int, last: int) -> _Finding:
        return _Finding(self._world.rank, socket.gethostname(), held.name, (first, last))

    def _differing(self, watched: "_Watched") -> list[_Finding]:
        """Return the tensors whose sums since the last check are not those of other ranks that should hold the same."""
        findings = []
        host = socket.gethostname()
        first_update, sums = watched.take_sums()
        for group, numbers in watched.numbers_by_group.items():
            own = sums[:, numbers]
            bounds = torch.stack([own, ~own])  # the least and, inverted, the greatest: one collective
            dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=group)
            is_bad = bounds[0] != ~bounds[1]
            holders = tuple(dist.get_process_group_ranks(group))
            for column in is_bad.any(dim=0).nonzero().flatten().tolist():
                row = int(is_bad[:, column].int().argmax())
                name = watched.held[int(numbers[column])].name
                at = (holders, first_update + row, int(own[row, column]))
                findings.append(_Finding(self._world.rank, host, name, None, *at))
        return findings


class _Watched:
    """Tensors that change for the same reason, their sums, and those of all steps since the last check."""

    def __init__(self, held: Sequence[HeldTensor], device: torch.device) -> None:
        self.held = held
        self._sums = BitSums([one.tensor for one in held], device)
        self.sums = self.sum()
        self._of_steps = [self.sums]
        self._first_update = 0  # of those sums, since the last check
        by_group: dict[dist.ProcessGroup, list[int]] = {}
        for number, one in enumerate(held):
            for group in one.replicas:
                by_group.setdefault(group, []).append(number)
        self.numbers_by_group = {group: torch.tensor(of, device=device) for group, of in by_group.items()}

    def sum(self) -> Tensor:
        """Return the sums as they are now."""
        return self._sums.compute()

    def remember(self) -> None:
        """Take the sums of this step."""
        self.sums = self.sum()
        if self.numbers_by_group:
            self._of_steps.append(self.sums)

    def take_sums(self) -> tuple[int, Tensor]:
        """Return the sums of all steps since this was called last, (steps, tensors), and the number of the first."""
        first_update, sums = self._first_update, torch.stack(self._of_steps or [self.sums])
        self._of_steps, self._first_update = [], 1
        return first_update, sums

    def by_name(self) -> dict[str, int]:
        """Return the sums that were taken last, by the names of the tensors."""
        return dict(zip((one.name for one in self.held), self.sums.tolist(), strict=True))


def describe(findings: Sequence[_Finding], last_checked: int) -> str:
    """Name the ranks and tensors that are wrong, given what all ranks found since step `last_checked`.

    Between two steps means: after the update of the first and before that of the second. A rank whose tensor changed
    there is the cause, and the first one of them: wrong weights give wrong gradients, but these are summed before ranks
    use them, so that replicas which held the same still do. Else those ranks are wrong whose sums are not those of
    most.
    """
    changed = [(finding.updates, finding) for finding in findings if finding.updates is not None]
    if changed:
        first = min((updates for updates, _ in changed), key=lambda updates: updates[1])
        steps = f"steps {last_checked + first[0]} and {last_checked + first[1]}"
        places = _names_by_place(finding for updates, finding in changed if updates == first)
        return "; ".join(f"on {place}, {names} changed between {steps}" for place, names in places.items())
    first_update = min(finding.since for finding in findings)
    by_tensor: dict[tuple[str, tuple[int, ...]], list[_Finding]] = {}
    for finding in findings:
        if finding.since == first_update:
            by_tensor.setdefault((finding.name, finding.holders), []).append(finding)
    since = f"since step {last_checked + first_update}"
    suspects = [_outvoted(of_tensor) for of_tensor in by_tensor.values()]
    voted = [finding for outvoted in suspects if outvoted is not None for finding in outvoted]
    if voted:
        return "; ".join(
            f"on {place}, {names} differ from those of most ranks that should hold the same, {since}"
            for place, names in _names_by_place(voted).items()
        )
    (_, holders), of_tensor = next(iter(by_tensor.items()))
    names = _names_text([name for name, of_name in by_tensor if of_name == holders])
    hosts = ", ".join(sorted({finding.host for finding in of_tensor}))
    return f"{ranks_text(holders)} ({hosts}) differ in {names}, {since}; nothing says which of them is wrong"


def _outvoted(findings: Sequence[_Finding]) -> list[_Finding] | None:
    """Return those of one tensor whose value is not that of more than half; None if none has so many."""
    [(value, count)] = Counter(finding.found_sum for finding in findings).most_common(1)
    return None if 2 * count <= len(findings) else [finding for finding in findings if finding.found_sum != value]


def _names_by_place(findings: Iterable[_Finding]) -> dict[str, str]:
    """Return the names of the tensors, as text, by rank and host."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        of_place = names.setdefault(f"rank {finding.rank} ({finding.host})", [])
        if finding.name not in of_place:
            of_place.append(finding.name)
    return {place: _names_text(of_place) for place, of_place in names.items()}


def _names_text(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_TENSORS_NAMED} more" if len(names) > MAX_TENSORS_NAMED else ""
    return ", ".join(names[:MAX_TENSORS_NAMED]) + more
