"""Programs as text, one action a line (see `actions`), which is read back exactly.

Plan files hold single actions. Whole programs are written for reading.
"""

import re
from functools import lru_cache

from mmtrain.errors import ProgramError
from mmtrain.program.ir.actions import (
    Action,
    Backward,
    Compute,
    Direction,
    Dispatch,
    Fill,
    Forward,
    GatherParams,
    Partial,
    Payload,
    Recv,
    ReduceGrads,
    ReduceShared,
    Send,
    Share,
    Step,
)
from mmtrain.program.ir.graph import Edge, Microbatch, StageGraph, StageId
from mmtrain.program.ir.program import Program

_LETTER: dict[Payload, str] = {"activation": "A", "gradient": "G"}
_PAYLOAD: dict[str, Payload] = {letter: payload for payload, letter in _LETTER.items()}
_PART: dict[str, Direction] = {"PF": "F", "PB": "B"}
_FORMS = (
    "F STAGE MB, B STAGE MB, PF|PB STAGE MB LO:HI, any of these followed by |GAP| PF ..., PB ..., "
    "SA|SG|RA|RG EDGE MB MB @RANK, DA|DG EDGE INDEX INDEX, XA|XG EDGE MB, RS UNIT CHUNK, GP UNIT CHUNK, RT NAME, STEP, "
    "with STAGE like llm.0, MB like llm:0.3, EDGE like vision.0>llm.0"
)


def action_to_text(action: Action) -> str:
    """Print one action."""
    match action:
        case Forward(stage, mb):
            return f"F {stage} {mb}"
        case Backward(stage, mb):
            return f"B {stage} {mb}"
        case Partial(stage, mb, kind, lo, hi):
            return f"P{kind} {stage} {mb} {lo}:{hi}"
        case Fill(host, gap, partials):
            return f"{action_to_text(host)} |{gap}| {', '.join(map(action_to_text, partials))}"
        case Send(edge, src, dst, peer, payload):
            return f"S{_LETTER[payload]} {edge} {src} {dst} @{peer}"
        case Recv(edge, src, dst, peer, payload):
            return f"R{_LETTER[payload]} {edge} {src} {dst} @{peer}"
        case Share(edge, mb, payload):
            return f"X{_LETTER[payload]} {edge} {mb}"
        case Dispatch(edge, src_index, dst_index, payload):
            return f"D{_LETTER[payload]} {edge} {src_index} {dst_index}"
        case ReduceGrads(unit, chunk, bucket):
            return f"RS {unit} {chunk} {bucket}" if bucket else f"RS {unit} {chunk}"
        case ReduceShared(name):
            return f"RT {name}"
        case GatherParams(unit, chunk, bucket):
            return f"GP {unit} {chunk} {bucket}" if bucket else f"GP {unit} {chunk}"
        case Step():
            return "STEP"


@lru_cache(maxsize=1 << 16)  # orders of one search repeat most of their lines
def action_from_text(line: str) -> Action:
    """Read one action back.

    Raises:
        ValueError: the line is no action.
    """
    if "|" in line:
        return _fill(line)
    match line.split():
        case ["PF" | "PB" as verb, stage, mb, segments]:
            return Partial(_stage(stage), _microbatch(mb), _PART[verb], *_segments(segments))
        case ["F", stage, mb]:
            return Forward(_stage(stage), _microbatch(mb))
        case ["B", stage, mb]:
            return Backward(_stage(stage), _microbatch(mb))
        case ["SA" | "SG" as verb, edge, src, dst, peer]:
            return Send(_edge(edge), _microbatch(src), _microbatch(dst), _rank(peer), _PAYLOAD[verb[1]])
        case ["RA" | "RG" as verb, edge, src, dst, peer]:
            return Recv(_edge(edge), _microbatch(src), _microbatch(dst), _rank(peer), _PAYLOAD[verb[1]])
        case ["XA" | "XG" as verb, edge, mb]:
            return Share(_edge(edge), _microbatch(mb), _PAYLOAD[verb[1]])
        case ["DA" | "DG" as verb, edge, src, dst]:
            return Dispatch(_edge(edge), int(src), int(dst), _PAYLOAD[verb[1]])
        case ["RS", unit, *numbers]:
            return ReduceGrads(unit, *_chunk_and_bucket(numbers))
        case ["RT", name]:
            return ReduceShared(name)
        case ["GP", unit, *numbers]:
            return GatherParams(unit, *_chunk_and_bucket(numbers))
        case ["STEP"]:
            return Step()
    raise ValueError("no such action")


def program_to_text(program: Program) -> str:
    """Print a program: a line `rank N` before each rank's actions."""
    lines = []
    for rank, actions in program.actions.items():
        lines += [f"rank {rank}", *(action_to_text(action) for action in actions)]
    return "\n".join(lines) + "\n"


def program_from_text(text: str, graph: StageGraph) -> Program:
    """Read a program of `graph` back. Empty lines are skipped.

    Raises:
        ProgramError: a line is neither an action nor `rank N`, or a rank comes twice.
    """
    actions: dict[int, list[Action]] = {}
    current: list[Action] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if heading := re.fullmatch(r"rank (\d+)", line.strip()):
            rank = int(heading[1])
            if rank in actions:
                raise ProgramError(f"program text, line {number}: rank {rank} comes a second time; join its actions")
            current = actions[rank] = []
        elif line.strip():
            if current is None:
                raise ProgramError(f"program text, line {number}: {line!r} before the first line `rank N`")
            try:
                current.append(action_from_text(line))
            except ValueError as error:
                raise ProgramError(f"program text, line {number}: {line!r}: {error}; allowed: {_FORMS}") from error
    return Program(graph, {rank: tuple(actions_of_rank) for rank, actions_of_rank in actions.items()})


def _fill(line: str) -> Fill:
    if not (match := re.fullmatch(r"([^|]*)\|\s*(\d+)\s*\|([^|]*)", line)):
        raise ValueError("a gap is written as HOST |GAP| PARTIAL, PARTIAL")
    host = action_from_text(match[1])
    partials = [action_from_text(part) for part in match[3].split(",")]
    if not isinstance(host, Compute):
        raise ValueError(f"{action_to_text(host)!r} has no gap")
    return Fill(host, int(match[2]), tuple(_partial(part) for part in partials))


def _partial(action: Action) -> Partial:
    if not isinstance(action, Partial):
        raise ValueError(f"{action_to_text(action)!r} is no partial")
    return action


def _segments(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+):(\d+)", text)):
        raise ValueError(f"{text!r} is no range of segments")
    return int(match[1]), int(match[2])


def _stage(text: str) -> StageId:
    if not (match := re.fullmatch(r"([^\s.:>]+)\.(\d+)", text)):
        raise ValueError(f"{text!r} is no stage")
    return StageId(match[1], int(match[2]))


def _microbatch(text: str) -> Microbatch:
    if not (match := re.fullmatch(r"([^\s.:>]+):(\d+)\.(\d+)", text)):
        raise ValueError(f"{text!r} is no microbatch")
    return Microbatch(match[1], int(match[2]), int(match[3]))


def _edge(text: str) -> Edge:
    src, arrow, dst = text.partition(">")
    if not arrow:
        raise ValueError(f"{text!r} is no edge")
    return Edge(_stage(src), _stage(dst))


def _chunk_and_bucket(numbers: list[str]) -> tuple[int, int]:
    if len(numbers) not in (1, 2):
        raise ValueError(f"{' '.join(numbers)!r} is neither a chunk nor a chunk and a bucket")
    return int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else 0


def _rank(text: str) -> int:
    if not re.fullmatch(r"@\d+", text):
        raise ValueError(f"{text!r} is no rank")
    return int(text[1:])
