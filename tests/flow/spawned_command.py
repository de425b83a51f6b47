"""Run `mmtrain` as on a machine with GPUs: ranks are spawned, not forked, so that what they get must be pickled.

`python -m tests.flow.spawned_command train RECIPE ...` is `mmtrain train RECIPE ...`, which chooses this by itself only
where it finds a GPU. The processes that it and its ranks start are written to the file that `LOG_VARIABLE` names.
"""

import multiprocessing
import os
import sys

LOG_VARIABLE = "STARTED_PROCESSES"
SPAWNED_RANK = "spawned rank"


def _log(line: str) -> None:
    with open(os.environ[LOG_VARIABLE], "a", encoding="utf-8") as file:
        file.write(line + "\n")


def _log_started(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen":
        command = arguments[1]
        _log(" ".join(map(str, command)) if isinstance(command, list) else str(command))


if __name__ in ("__main__", "__mp_main__"):
    sys.addaudithook(_log_started)
if __name__ == "__mp_main__":  # a spawned process imports the main module of its parent under this name
    _log(SPAWNED_RANK)
if __name__ == "__main__":
    from mmtrain.cli import main

    multiprocessing.set_start_method("spawn")
    main()
