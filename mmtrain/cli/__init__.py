"""The command line: one small file per command, which parses arguments, calls one function and prints the result.

Commands import what they need when they run, so that `mmtrain --help` stays fast and loads no torch. Read `app` first.
"""

import os
import sys

from mmtrain.process_end import end_now_if_expected

__all__ = ["main"]


def main() -> None:
    """Run the command in `sys.argv`; exit with 0 (done), 1 (run failed), 2 (wrong input) or 75 (stopped, can go on)."""
    from mmtrain.cli.streams import mend_streams

    mend_streams()
    # torch reads it when it is loaded. Warnings of its C++ code are pages of frames for a rank that another has left.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.argv[1:2] == ["train"]:
        # Before anything else is imported. Other commands leave nothing half done when a signal ends them.
        from mmtrain.runtime.resilience.signals import end_on_stop_signals

        end_on_stop_signals()
    from mmtrain.cli.app import main as run_command

    try:
        run_command()
    except SystemExit as end:
        end_now_if_expected(end.code)
        raise
