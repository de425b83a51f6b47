"""The demo, from nothing to a trained and scored multimodal model: what `make demo` runs.

Each line below is a command that a user can type as well; this script prints it, runs it and times it.
"""

import shutil
import subprocess
import sys
import time
from pathlib import Path

RUN = Path("runs/demo")
COMMANDS = [
    ["data", "demo", "--out", "demo-data"],
    ["plan", "recipes/demo.yaml"],
    ["train", "recipes/demo.yaml", "--run-dir", str(RUN)],
    ["evaluate", str(RUN)],
]


def main() -> int:
    if RUN.exists():
        kept = RUN.with_name(f"{RUN.name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(RUN.stat().st_mtime))}")
        shutil.move(RUN, kept)
        print(f"kept the run before this one as {kept}")
    begin = time.monotonic()
    for command in COMMANDS:
        print(f"\n$ mmtrain {' '.join(command)}", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "mmtrain", *command], check=False).returncode
        if code:
            return code
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
    print(
        f"\nThe demo took {time.monotonic() - begin:.0f} s. Its run is in {RUN}; try more with the README's commands."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
