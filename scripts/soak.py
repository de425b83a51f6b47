"""Train for an hour while something fails every minute, and compare the end with an undisturbed run.

    python -m scripts.soak --minutes 60 --every 60

Trains the demo twice side by side, each on half of the processor cores, so that whatever else the machine does slows
both: one run is undisturbed and lasts that long, the other takes as many steps with a random fault every `--every`
seconds. Each command that ends before its last step is started again with `--resume`, as a user or a scheduler would.
Exits with 1 unless the weights are bit-equal, at least 80% of the time went into steps that count (goodput), and
neither memory nor open files of the processes grew from start to start.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from mmtrain.checkpoint import find, open_newest_good
from mmtrain.data.synthetic.demo import generate_demo
from mmtrain.report.runlog import METRICS_FILE
from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER, RUN_STATE_FILE
from scripts.measurements import Report, arguments, set_options, start
from tests.flow.runs import tensors

RECIPE = Path(__file__).parents[1] / "recipes" / "demo.yaml"
CALIBRATION_STEPS = 40
# Young's rule, sqrt(2 x seconds of a save x seconds between faults), gives about 5 s.
CHECKPOINT_EVERY_STEPS = 20
MIN_GOODPUT = 0.8
MAX_GROWTH = 1.15  # of memory and open files: the last starts against the first
WATCHDOG_S = 5.0
LOCKED_RETRY_S = 0.5  # a killed launcher's ranks still save
EXIT_WRONG_INPUT = 2


@dataclass
class Run:
    """A run of the demo in a folder, started as often as it takes."""

    folder: Path
    data: Path
    num_steps: int
    cores: list[int]
    starts: int = 0
    peak_rss_mb: list[float] = field(default_factory=list)  # of all processes, by start
    peak_files: list[int] = field(default_factory=list)  # open files of all processes, by start

    def start(self) -> psutil.Popen:
        """Start the command, or start it again."""
        settings = [
            f"data.sources.0.path={self.data}/train.json",
            f"data.validation.0.path={self.data}/heldout.json",
            f"data.tokenizer={self.data}/tokenizer.json",
            f"train.steps={self.num_steps}",
            f"train.watchdog_s={WATCHDOG_S}",
            f"train.checkpoint.every={CHECKPOINT_EVERY_STEPS}",
            "train.validate_every=0",
            "train.optimizer.schedule=constant",
        ]
        command = ["train", str(RECIPE), "--run-dir", str(self.folder), "--max-restarts", "100"]
        command += set_options(settings)
        if find(self.folder / CHECKPOINTS_FOLDER) or (self.folder / RUN_STATE_FILE).exists():
            command.append("--resume")
        self.starts += 1
        self.peak_rss_mb.append(0.0)
        self.peak_files.append(0)
        log = (self.folder.parent / f"{self.folder.name}.log").open("a")
        launcher = psutil.Popen([sys.executable, "-m", "mmtrain", *command], stdout=log, stderr=subprocess.STDOUT)
        launcher.cpu_affinity(self.cores)  # at once: the ranks inherit it
        return launcher

    def sample(self, launcher: psutil.Popen) -> None:
        """Note memory and open files of the launcher and its ranks."""
        processes = [launcher, *_ranks(launcher)]
        try:
            rss_mb = sum(process.memory_info().rss for process in processes) / 1e6
            num_files = sum(process.num_fds() for process in processes)
        except psutil.Error:  # one of them has just ended
            return
        self.peak_rss_mb[-1] = max(self.peak_rss_mb[-1], rss_mb)
        self.peak_files[-1] = max(self.peak_files[-1], num_files)

    def state(self) -> list[bytes]:
        """Return every weight and moment at the end."""
        named = tensors(open_newest_good(self.folder / CHECKPOINTS_FOLDER, print))
        return [named[name].view(torch.uint8).numpy().tobytes() for name in sorted(named)]


def _ranks(launcher: psutil.Popen) -> list[psutil.Process]:
    try:
        return list(launcher.children())
    except psutil.Error:
        return []


def _signal_a_rank(number: signal.Signals) -> Callable[[Run, psutil.Popen, random.Random], None]:
    def inject(run: Run, launcher: psutil.Popen, rng: random.Random) -> None:
        if ranks := _ranks(launcher):
            rng.choice(ranks).send_signal(number)

    return inject


def _signal_the_launcher(number: signal.Signals) -> Callable[[Run, psutil.Popen, random.Random], None]:
    def inject(run: Run, launcher: psutil.Popen, rng: random.Random) -> None:
        launcher.send_signal(number)

    return inject


def _flip_a_byte_of_the_newest_checkpoint(run: Run, launcher: psutil.Popen, rng: random.Random) -> None:
    """Damage the newest checkpoint, then kill a rank, so that the run resumes from the one before."""
    checkpoints = find(run.folder / CHECKPOINTS_FOLDER)
    if len(checkpoints) > 1:
        path = rng.choice(sorted(checkpoints[0].glob("*.safetensors")))
        with path.open("r+b") as file:
            position = rng.randrange(path.stat().st_size)
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 255]))
    _signal_a_rank(signal.SIGKILL)(run, launcher, rng)


def _empty_the_state(run: Run, launcher: psutil.Popen, rng: random.Random) -> None:
    (run.folder / RUN_STATE_FILE).write_bytes(b"")
    _signal_the_launcher(signal.SIGTERM)(run, launcher, rng)


def _tear_the_last_metrics(run: Run, launcher: psutil.Popen, rng: random.Random) -> None:
    _signal_the_launcher(signal.SIGKILL)(run, launcher, rng)
    path = run.folder / METRICS_FILE
    os.truncate(path, max(0, path.stat().st_size - 7))


FAULTS: dict[str, Callable[[Run, psutil.Popen, random.Random], None]] = {
    "a rank is killed": _signal_a_rank(signal.SIGKILL),
    "a rank is stopped": _signal_a_rank(signal.SIGSTOP),
    "a rank gets SIGTERM": _signal_a_rank(signal.SIGTERM),
    "the launcher is killed": _signal_the_launcher(signal.SIGKILL),
    "the launcher gets SIGTERM": _signal_the_launcher(signal.SIGTERM),
    "the terminal is closed": _signal_the_launcher(signal.SIGHUP),
    "the newest checkpoint is damaged": _flip_a_byte_of_the_newest_checkpoint,
    "the state file is empty": _empty_the_state,
    "the metrics are torn": _tear_the_last_metrics,
}


def main() -> None:
    """Soak, and print what happened."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="length of the undisturbed run")
    parser.add_argument("--every", type=float, default=60.0, help="seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults")
    options = parser.parse_args()
    report = start("Soaking", options)
    cores = sorted(os.sched_getaffinity(0))
    half = max(1, len(cores) // 2)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary, ThreadPoolExecutor(1) as background:
        folder = Path(temporary)
        generate_demo(folder / "data", seed=3, train=400, heldout=8)
        start_s, step_s = _time(Run(folder / "calibration", folder / "data", CALIBRATION_STEPS, cores[:half]))
        num_steps = max(CALIBRATION_STEPS, int(60 * options.minutes / step_s))
        print(f"{num_steps} steps of {step_s:.2f} s on {half} of {len(cores)} cores; a start takes {start_s:.0f} s")
        undisturbed = Run(folder / "undisturbed", folder / "data", num_steps, cores[:half])
        soaked = Run(folder / "soaked", folder / "data", num_steps, cores[-half:])
        reference = background.submit(train, undisturbed)
        faults: Counter[str] = Counter()
        soaked_s = train(soaked, options.every, random.Random(options.seed), faults)
        sys.exit(_write(report, undisturbed, reference.result(), soaked, soaked_s, faults))


def train(
    run: Run, every_s: float = float("inf"), rng: random.Random | None = None, faults: Counter[str] | None = None
) -> float:
    """Train to the last step, with a fault after every `every_s` seconds; return the seconds it took."""
    began_s = time.monotonic()
    next_fault_s = began_s + every_s
    while True:
        launcher = run.start()
        while launcher.poll() is None:
            time.sleep(0.2)
            run.sample(launcher)
            if rng is not None and faults is not None and time.monotonic() >= next_fault_s:
                name = rng.choice(sorted(FAULTS))
                faults[name] += 1
                print(f"{time.monotonic() - began_s:6.0f} s  {name}", flush=True)
                FAULTS[name](run, launcher, rng)
                next_fault_s = time.monotonic() + every_s
        if launcher.returncode == 0:
            return time.monotonic() - began_s
        if launcher.returncode == EXIT_WRONG_INPUT:
            time.sleep(LOCKED_RETRY_S)


def _time(run: Run) -> tuple[float, float]:
    """Return the seconds until the first step of a run, and of a step."""
    took_s = train(run)
    metrics = [json.loads(line) for line in (run.folder / METRICS_FILE).read_text().splitlines()]
    step_s = statistics.median(entry["step_time_s"] for entry in metrics)
    return took_s - step_s * run.num_steps, step_s


def _write(
    report: Report, undisturbed: Run, undisturbed_s: float, soaked: Run, soaked_s: float, faults: Counter[str]
) -> int:
    """Write the outcome; return the exit code."""
    is_equal = undisturbed.state() == soaked.state()
    goodput = undisturbed_s / soaked_s
    report.targets()
    kinds = ", ".join(f"{name} {count}" for name, count in faults.most_common())
    report.figure("faults", f"{sum(faults.values())}: {kinds}")
    report.row(
        "weights at the end", "bit-equal" if is_equal else "different", "bit-equal", "met" if is_equal else "missed"
    )
    report.figure("seconds, undisturbed / with faults", f"{undisturbed_s:.0f} / {soaked_s:.0f}")
    report.target("goodput", goodput, MIN_GOODPUT, at_least=True)
    growth = {}
    for name, peaks in (("memory in MB", soaked.peak_rss_mb), ("open files", soaked.peak_files)):
        third = max(1, len(peaks) // 3)
        first, last = statistics.median(peaks[:third]), statistics.median(peaks[-third:])
        growth[name] = last / first
        label = f"{name} of all processes, last over first third of {soaked.starts} starts ({first:.0f} -> {last:.0f})"
        report.target(label, growth[name], MAX_GROWTH)
    return int(not is_equal or goodput < MIN_GOODPUT or max(growth.values()) > MAX_GROWTH)


if __name__ == "__main__":
    main()
