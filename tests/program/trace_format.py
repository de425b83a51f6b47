"""What a trace must be so that Perfetto opens it and the commands that read one understand it."""

from itertools import pairwise
from typing import Any

COMPUTE = {"kind", "unit", "stage", "chunk", "replica", "microbatch"}
COMMUNICATION = {"p2p", "broadcast", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"}


def require_trace(trace: dict[str, Any]) -> None:
    """Assert that `trace` is a Chrome trace as the design describes it, whose spans on a track do not overlap."""
    other = trace["otherData"]
    assert isinstance(other["simulated"], bool)
    assert other["step_time_us"] >= 0
    assert isinstance(other["plan_sha256"], str)
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            named.add((event["pid"], event.get("tid")))
            continue
        assert {"name", "pid", "tid", "ts", "dur", "args"} <= event.keys()
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        require_args(event["tid"], event["args"])
        assert {(event["pid"], None), (event["pid"], event["tid"])} <= named, "tracks are named before they are drawn"
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert start >= end - 1e-3, "spans of a track overlap: viewers drop one of them"


def require_args(tid: int, args: dict[str, Any]) -> None:
    """Assert that the arguments of a span suit its track."""
    if tid == 0:
        parts = {"lo", "hi"} if args["kind"] in ("partial", "BI", "BW") else set()
        assert args.keys() == COMPUTE | parts
        assert args["kind"] in ("F", "B", "BI", "BW", "partial")
        return
    assert tid == 1
    assert args["kind"] in COMMUNICATION
    assert args.keys() - {"edge"} == {"kind", "bytes"}
    assert ("edge" in args) == (args["kind"] in ("p2p", "broadcast"))
    assert args["bytes"] >= 0
