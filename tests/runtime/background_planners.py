"""Planners of tests, in a module that imports next to nothing: the process that plans in the background imports it."""

import os
import signal
import threading
from pathlib import Path

from mmtrain.errors import PlanError
from mmtrain.planning.artifact.plan import Plan


def refuse(reason: str) -> Plan:
    raise PlanError(reason)


def give(plan: Plan) -> Plan:
    return plan


def fail() -> Plan:
    print("this line is no answer")
    raise ValueError("an error of ours")


def end_at_once() -> Plan:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def plan_for_ever(pid_file: Path) -> Plan:
    """Write pid and niceness of this process, then wait without an end."""
    pid_file.with_suffix(".part").write_text(f"{os.getpid()} {os.nice(0)}")
    pid_file.with_suffix(".part").rename(pid_file)
    threading.Event().wait()
    raise AssertionError
