"""Rules for a trace that Perfetto opens and that the commands of mmtrain can read.

The rules are those of the Trace Event Format and of what Perfetto's importer does with it: it drops complete events
without a duration, spans that overlap others on their track in part, and events before time 0; it counts in whole
nanoseconds; and it names tracks by metadata events, which carry no time.
"""

import json
import math
from itertools import pairwise
from typing import Any

COMPUTE = {"kind", "unit", "stage", "chunk", "replica", "microbatch"}
COMMUNICATION = {"p2p", "broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
LONGEST_US = 2**63 / 1000  # whole nanoseconds are kept in 64 bits


def require_trace(trace: dict[str, Any]) -> None:
    """Assert that `trace` is a Chrome trace as the design describes it, whose spans on a track do not overlap."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace, "it is JSON, without NaN, and with text as keys"
    assert trace["displayTimeUnit"] in ("ms", "ns")
    other = trace["otherData"]
    assert isinstance(other["simulated"], bool)
    assert other["step_time_us"] >= 0
    assert isinstance(other["plan_sha256"], str)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named: set[tuple[int, int | None]] = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert event["name"]
        assert is_number(event["pid"])
        if event["ph"] == "M":
            require_name(event, named)
            continue
        assert event.keys() == {"ph", "name", "pid", "tid", "ts", "dur", "args"}
        assert isinstance(event["ts"], int | float)
        assert 0 <= event["ts"] < LONGEST_US
        assert isinstance(event["dur"], int | float)
        assert 0 <= event["dur"] < LONGEST_US
        require_args(event["tid"], event["args"])
        assert {(event["pid"], None), (event["pid"], event["tid"])} <= named, "tracks are named before they are drawn"
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-3, "spans of a track overlap, and viewers drop one of them"


def require_name(event: dict[str, Any], named: set[tuple[int, int | None]]) -> None:
    """Assert that a metadata event names a process or one of its threads, once; enter it into `named`."""
    assert event["name"] in ("process_name", "thread_name")
    of_thread = event["name"] == "thread_name"
    assert event.keys() == {"ph", "name", "pid", "args"} | ({"tid"} if of_thread else set())
    assert event["args"].keys() == {"name"}
    assert isinstance(event["args"]["name"], str)
    assert event["args"]["name"]
    track = (event["pid"], event["tid"] if of_thread else None)
    assert track not in named, "a track is named once"
    named.add(track)


def require_args(tid: int, args: dict[str, Any]) -> None:
    """Assert that the arguments of a span suit its track."""
    if tid == 0:
        parts = {"lo", "hi"} if args["kind"] == "partial" else set()
        assert args.keys() == COMPUTE | parts
        assert args["kind"] in ("F", "B", "partial")
        assert all(is_number(args[key]) for key in args.keys() - {"kind", "unit"})
        return
    assert tid == (2 if args["kind"] in ("reduce_scatter", "all_gather") else 1)
    assert args["kind"] in COMMUNICATION
    assert args.keys() - {"edge"} == {"kind", "bytes"}
    assert ("edge" in args) == (args["kind"] in ("p2p", "broadcast"))
    assert is_number(args["bytes"])


def is_number(value: object) -> bool:
    """Return whether it is an integer from 0 on that every JSON reader reads as one."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < math.inf
