"""The command line: one small file a command. Each parses, calls one function and prints.

Commands import what they need when they run, so that `mmtrain --help` stays instant and loads no torch.
"""

from mmtrain.cli.app import main

__all__ = ["main"]
