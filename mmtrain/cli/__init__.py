"""The command line: one small file per command, which parses arguments, calls one function and prints the result.

Commands import what they need when they run, so that `mmtrain --help` stays fast and loads no torch. Read `app` first.
"""

from mmtrain.cli.app import main

__all__ = ["main"]
