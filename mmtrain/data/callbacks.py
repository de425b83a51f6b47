"""Types of the callbacks by which long work in this package reports to its caller."""

from collections.abc import Callable

NotifyCallback = Callable[[str], None]  # called with one line of text for the user
ProgressCallback = Callable[[int, int], None]  # called with (done, total)
