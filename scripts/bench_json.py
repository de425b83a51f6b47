"""Measure peak memory and processor seconds of reading a large JSON list of conversations that holds one emoji.

    python scripts/bench_json.py [MEGABYTES]

Compares mmtrain's reader with `json.load` and, where it is installed, with `ijson`. Each reads in a process of its own;
the memory is what the process takes beyond one that reads an empty list.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

READERS = ("mmtrain", "json", "ijson")


def write_conversations(path: Path, megabytes: float) -> None:
    turns = [{"from": "human", "value": "What is this? " * 20}, {"from": "gpt", "value": "Nobody knows. " * 20}]
    entry = json.dumps({"id": 1, "conversations": turns})
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        for _ in range(int(megabytes * 1e6 / (len(entry) + 1))):
            file.write(entry + ",")
        file.write('{"conversations": [{"from": "gpt", "value": "\N{GRINNING FACE}"}]}]')


def read(reader: str, path: Path) -> int:
    """Return the number of entries."""
    if reader == "mmtrain":
        from mmtrain.data.formats.json_list import read_json_list

        with path.open("rb") as file:
            return sum(1 for _ in read_json_list(file))
    if reader == "json":
        return len(json.loads(path.read_text(encoding="utf-8")))
    import ijson

    with path.open("rb") as file:
        return sum(1 for _ in ijson.items(file, "item", use_float=True))


def measure(reader: str, path: Path) -> tuple[int, float, float]:
    """Return entries, processor seconds, and peak megabytes of a process that reads the file."""
    command = [sys.executable, __file__, "--read", reader, str(path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(output[0]), float(output[1]), float(output[2])


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        started_s = time.process_time()
        num_entries = read(sys.argv[2], Path(sys.argv[3]))
        peak_megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        print(num_entries, time.process_time() - started_s, peak_megabytes)
        return
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 200.0
    with tempfile.TemporaryDirectory() as folder:
        large, empty = Path(folder, "large.json"), Path(folder, "empty.json")
        write_conversations(large, megabytes)
        empty.write_text("[]")
        size = large.stat().st_size / 1e6
        for reader in READERS:
            if find_spec(reader) is None:
                print(f"{reader}: not installed")
                continue
            _, _, idle = measure(reader, empty)
            num_entries, seconds, peak = measure(reader, large)
            print(f"{reader}: {num_entries} entries, {seconds:.1f} s, {size / seconds:.0f} MB/s, ", end="")
            print(f"{peak - idle:.0f} MB of memory for a file of {size:.0f} MB")


if __name__ == "__main__":
    main()
