"""Run the demo: make data, plan, train, evaluate and export a tiny multimodal model. `make demo` runs this script.

It runs commands that a user can type as well; it prints each one and its time.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

RUN = Path("runs/demo")
EXPORTED = RUN / "exported"  # in the folder of the run, so that both are moved away together
COMMANDS = [
    ["data", "demo", "--out", "demo-data"],
    ["plan", "recipes/demo.yaml"],
    ["train", "recipes/demo.yaml", "--run-dir", str(RUN)],
    ["evaluate", str(RUN)],
    ["export", str(RUN), "--out", str(EXPORTED)],
]


def main() -> int:
    if RUN.exists():
        finished = time.strftime("%Y%m%d-%H%M%S", time.localtime(RUN.stat().st_mtime))
        old_run = RUN.with_name(f"{RUN.name}-{finished}")
        shutil.move(RUN, old_run)
        print(f"moved the previous run to {old_run}")
    demo_started = time.monotonic()
    for command in COMMANDS:
        print(f"\n$ mmtrain {' '.join(command)}", flush=True)
        command_started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "mmtrain", *command], check=False).returncode
        if code:
            return code
        print(f"({time.monotonic() - command_started:.0f} s)", flush=True)
    print(
        f"\nThe demo took {time.monotonic() - demo_started:.0f} s. Its run is in {RUN}. The README shows more commands."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
