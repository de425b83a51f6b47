"""A slow, literal GPU with NCCL: the oracle for the proof that a program ends.

The host launches a rank's whole step without waiting. Its compute stream does one thing after another, and each
communicator has a stream of its own on which messages run one after another. A message runs when it is the first of its
communicator at both ends and both compute streams have done what was launched before it. The reductions of a rank run
in the same way on one stream.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from mmtrain.program.ir.matching import Launch, MatchedActions, Post


@dataclass
class _Device:
    compute: list[tuple[str, object]] = field(default_factory=list)  # ("join", joint action) or ("wait", ...)
    communicators: defaultdict[object, list[tuple[object, int]]] = field(default_factory=lambda: defaultdict(list))
    position: int = 0  # in `compute`


def runs_to_its_end(matched: MatchedActions, window: int | None = None) -> bool:
    """Run all devices until none can go on; return whether all have done everything."""
    devices = {rank: _launch(matched, rank, window) for rank in matched.sequences}
    done: set[object] = set()  # numbers of messages, and ("reduction", number of the joint action)
    while sum(_advance(matched, devices, rank, done) for rank in devices):
        pass
    return all(device.position == len(device.compute) for device in devices.values())


def _launch(matched: MatchedActions, rank: int, window: int | None) -> _Device:
    device = _Device()
    for step in matched.sequences[rank]:
        if isinstance(step, Launch):
            device.communicators["reductions"].append((("reduction", step.joint_action), len(device.compute)))
            continue
        if not isinstance(step, Post):
            device.compute += [("wait", message) for message in step.reads]
            device.compute += [("wait", ("reduction", number)) for number in step.awaits]
            device.compute.append(("join", step.joint_action))
            continue
        message = matched.messages[step.message]
        stream = device.communicators[message.channel]
        if window is not None and message.sender == rank and len(stream) >= window:
            device.compute.append(("wait", stream[-window][0]))
        stream.append((step.message, len(device.compute)))
    return device


def _advance(matched: MatchedActions, devices: dict[int, _Device], rank: int, done: set[object]) -> bool:
    device = devices[rank]
    moved = False
    for communicator, stream in device.communicators.items():
        message = next((m for m, _ in stream if m not in done), None)
        if message is not None and all(
            _is_next(devices, r, communicator, message, done) for r in _ends(matched, message)
        ):
            done.add(message)
            moved = True
    if device.position == len(device.compute):
        return moved
    kind, number = device.compute[device.position]
    if kind == "wait":
        moved |= number in done
        device.position += number in done
    else:
        assert isinstance(number, int)
        ranks = matched.joint_actions[number].ranks
        if all(_stands_at(devices[r], (kind, number)) for r in ranks):
            for r in ranks:
                devices[r].position += 1
            moved = True
    return moved


def _stands_at(device: _Device, operation: tuple[str, object]) -> bool:
    return device.position < len(device.compute) and device.compute[device.position] == operation


def _ends(matched: MatchedActions, message: object) -> tuple[int, ...]:
    if isinstance(message, tuple):
        return matched.joint_actions[message[1]].ranks
    assert isinstance(message, int)
    return matched.messages[message].sender, matched.messages[message].send.peer


def _is_next(devices: dict[int, _Device], rank: int, communicator: object, message: object, done: set[object]) -> bool:
    left = [entry for entry in devices[rank].communicators[communicator] if entry[0] not in done]
    first, launched_after = left[0] if left else (None, 0)
    return first == message and devices[rank].position >= launched_after
