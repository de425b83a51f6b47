"""Tables and sentences as plain text of one width."""

import io

from rich.console import RenderableType
from rich.text import Text

from mmtrain.report.console import Console

DEFAULT_WIDTH = 120


def render_text(*parts: RenderableType, width: int = DEFAULT_WIDTH) -> str:
    """Write the parts below each other, without colors."""
    console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(Text(part) if isinstance(part, str) else part)
    return capture.get()


def seconds_text(seconds: float) -> str:
    """Write seconds with three digits: `1.23 s`, `97.1 ms`."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def exact_time_text(seconds: float) -> str:
    """Write seconds with two decimals, to be compared with others: `16.42 s`, `806.47 ms`."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def span_time_text(seconds: float) -> str:
    """Write the seconds of a part of a step with three decimals: `1.234 s`, `0.807 ms`."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.3f} ms"


def time_spread_text(ranks: float | None, layers: float) -> str:
    """Write how unevenly fast ranks are, with the settings that state it; `ranks` is None where only one was timed."""
    between = "" if ranks is None else f"ranks {ranks:.1%} (cluster.time_spread.ranks), "
    return f"spread of times for the same work: {between}passes of a layer {layers:.1%} (cluster.time_spread.layers)"


def memory_text(gib: float) -> str:
    """Write memory with three digits: `73.9 GiB`, `59.1 MiB`."""
    return f"{gib:.3g} GiB" if gib * 1024 >= 999.5 else f"{gib * 1024:.3g} MiB"  # not 1.01e+03 MiB
