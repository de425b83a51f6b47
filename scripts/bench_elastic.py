"""Measure how long an elastic run under torchrun does not train: `python -m scripts.bench_elastic --count 10`.

Four agents with one rank each train the small demo, and one fault ends it: an agent is killed with its rank (`node`),
or the process of rank 0 is stopped while its agent lives (`stop`). Seconds count from the fault to the end of the next
step. Agents wait five seconds of their own, as docs/running.md sets them: until a silent agent counts as gone, and for
further nodes.

Each rank notes when it starts an activity, with the processor seconds that it has used by then. So phases can be
compared on a machine that is busy with other things.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.measurements import Report, arguments, start

PHASES_VARIABLE = "BENCH_ELASTIC_PHASES"  # folder in which ranks note what they start
NUM_RANKS = 4
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"  # as docs/running.md has it
AGENTS_WAIT_S = 5.0
POLL_S = 0.02
LIMIT_S = 600.0
SETTINGS = (
    "train.global_batch=32", "train.steps=100000", "train.checkpoint.every=5", "train.validate_every=0",
    "model.vision.layers=1", "model.llm.layers=2", "data.seq_len=192", "train.optimizer.lr=1e-5",
)  # fmt: skip


def main() -> None:
    """Be the driver, or with the variable of `PHASES_VARIABLE` one of its ranks."""
    if PHASES_VARIABLE in os.environ and "RANK" in os.environ:
        _be_rank(Path(os.environ[PHASES_VARIABLE]))
        return
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=10, help="faults of each kind (default: 10)")
    parser.add_argument("--fault", choices=["node", "stop"], nargs="+", default=["node", "stop"])
    parser.add_argument("--set", action="append", default=[], help="a setting, such as train.peer_copies.every=1")
    options = parser.parse_args()
    report = start("Seconds to the next step of an elastic run under torchrun", options)
    with (
        tempfile.TemporaryDirectory(prefix="bench-elastic-") as temporary,
        tempfile.TemporaryDirectory(prefix="bench-elastic-", dir="/dev/shm") as memory,  # runs are killed in the end
    ):
        folder = Path(temporary)
        settings = [*options.set, f"train.peer_copies.folder={memory}"]
        _generate(folder / "data")
        for fault in options.fault:
            recoveries = [
                _measure(folder, folder / f"{fault}-{number}", fault, settings) for number in range(options.count)
            ]
            _write(report, fault, recoveries)


@dataclass(frozen=True)
class Recovery:
    """One fault, and what came after it."""

    seconds: float  # to the end of the next step
    repeated_steps: int
    phases: dict[str, tuple[float, float]]  # of the new rank 0: seconds, and processor seconds


def _generate(folder: Path) -> None:
    from mmtrain.data.synthetic.demo import generate_demo

    generate_demo(folder, seed=3, train=96, heldout=8)


def _measure(folder: Path, run: Path, fault: str, settings: list[str]) -> Recovery:
    """Start a run, inject the fault, and wait for the next step."""
    from mmtrain.report import read_metrics
    from mmtrain.runtime.resilience.launch import free_port
    from mmtrain.runtime.training.standby_plans import standby_plan_path

    run.mkdir()
    run_dir, notes, port = run / "run", run / "phases", free_port()
    notes.mkdir()
    environment = os.environ | {
        PHASES_VARIABLE: str(notes), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }  # fmt: skip
    command = _agent(folder / "data", run_dir, port, settings)
    with ExitStack() as stack:
        output = stack.enter_context((run / "output").open("w"))
        agents = []
        for _ in range(NUM_RANKS):
            agents.append(psutil.Popen(command, env=environment, stdout=output, stderr=output))
            stack.callback(_end, agents[-1])
            _await(lambda: _listens(port))  # the first agent holds the rendezvous
        _await(lambda: _is_ready(run_dir, standby_plan_path(run_dir, NUM_RANKS - 1)))
        pids = _rank_pids(notes)
        before = _resumed(run_dir, 0)  # agents that come late start the ranks again
        victim = psutil.Process(pids[0 if fault == "stop" else NUM_RANKS - 1])
        if fault == "node":
            victim.parent().kill()
            victim.kill()
        else:
            victim.send_signal(signal.SIGSTOP)
        num_steps = read_metrics(run_dir)[-1]["step"]
        fault_s, left = time.time(), set(pids.values())
        _await(lambda: bool(_resumed(run_dir, len(before))))
        end_s = time.time()
        [first] = _resumed(run_dir, len(before))
        new_rank = next(pid for rank, pid in _rank_pids(notes).items() if rank == 0)
        assert new_rank not in left, "rank 0 was started again"
        return Recovery(end_s - fault_s, num_steps - first + 1, _phases(notes, new_rank, fault_s, end_s))


def _resumed(run_dir: Path, num_known: int) -> list[int]:
    """Return the first steps after restarts, without the first so many of them."""
    from mmtrain.report import read_metrics

    return [step["step"] for step in read_metrics(run_dir) if "resume_s" in step][num_known:]


def _agent(data: Path, run_dir: Path, port: int, settings: list[str]) -> list[str]:
    recipe = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    paths = (
        f"data.sources.0.path={data}/train.json", f"data.validation.0.path={data}/heldout.json",
        f"data.tokenizer={data}/tokenizer.json",
    )  # fmt: skip
    changes = [part for setting in (*SETTINGS, *paths, *settings) for part in ("--set", setting)]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={NUM_RANKS - 1}:{NUM_RANKS}", "--nproc-per-node=1",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", f"--rdzv-conf={RENDEZVOUS}",
        "--max-restarts=10", "-m", "scripts.bench_elastic",
        "train", str(recipe), "--run-dir", str(run_dir), *changes, "--elastic",
    ]  # fmt: skip


def _be_rank(notes: Path) -> None:
    """Train as `mmtrain` does, and note when each activity starts."""
    process = psutil.Process()
    file = (notes / f"{os.environ['RANK']}-{os.getpid()}").open("w", buffering=1)

    def note(what: str) -> None:
        file.write(f"{time.time():.3f} {time.process_time():.3f} {what}\n")

    file.write(f"{process.create_time():.3f} 0 interpreter\n")
    note("imports of mmtrain")
    from mmtrain.cli import main as run_command
    from mmtrain.runtime.execution.activity import Activity

    start_activity = Activity.start
    seen: set[str] = set()

    def start_noting(self: Activity, *arguments: object) -> None:
        name = arguments[0] if isinstance(arguments[0], str) else "the first step"
        if name not in seen and "the first step" not in seen:
            seen.add(name)
            note(name)
        start_activity(self, *arguments)  # type: ignore[arg-type]

    Activity.start = start_noting  # type: ignore[method-assign]
    note("command line and joining")
    run_command()


def _is_ready(run_dir: Path, plan: Path) -> bool:
    """Return whether the run has trained on all ranks for a while, and has what a restart needs."""
    from mmtrain.checkpoint import find
    from mmtrain.report import read_metrics
    from mmtrain.runtime.run_folder import CHECKPOINTS_FOLDER

    steps = read_metrics(run_dir)[-3:]
    return (
        [step["ranks"] for step in steps] == [NUM_RANKS] * 3
        and plan.exists()
        and bool(find(run_dir / CHECKPOINTS_FOLDER))
    )


def _rank_pids(notes: Path) -> dict[int, int]:
    """Return the newest process of each rank."""
    newest = {}
    for path in sorted(notes.iterdir(), key=lambda path: path.stat().st_ctime_ns):
        rank, pid = path.name.split("-")
        newest[int(rank)] = int(pid)
    return newest


def _phases(notes: Path, pid: int, fault_s: float, end_s: float) -> dict[str, tuple[float, float]]:
    [path] = notes.glob(f"*-{pid}")
    entries = [line.split(" ", 2) for line in path.read_text(encoding="utf-8").splitlines()]
    times = [(float(wall), float(cpu), what) for wall, cpu, what in entries]
    phases = {"until the agents have started rank 0": (times[0][0] - fault_s, 0.0)}
    for (wall, cpu, what), (next_wall, next_cpu, _) in zip(times, [*times[1:], (end_s, times[-1][1], "")], strict=True):
        phases[what] = (next_wall - wall, next_cpu - cpu)
    return phases


def _await(is_true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_true():
        if time.monotonic() > end_s:
            raise TimeoutError
        time.sleep(POLL_S)


def _listens(port: int) -> bool:
    return any(c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in psutil.net_connections("tcp"))


def _end(agent: "subprocess.Popen[bytes]") -> None:
    process = psutil.Process(agent.pid)
    for child in (*process.children(recursive=True), process):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    agent.wait()


def _write(report: Report, fault: str, recoveries: list[Recovery]) -> None:
    seconds = [recovery.seconds for recovery in recoveries]
    limit_s = AGENTS_WAIT_S + (15.0 if fault == "node" else 25.0)
    report.targets()
    report.target(f"{fault}: median seconds to the next step", statistics.median(seconds), limit_s)
    report.figure(f"{fault}: all", ", ".join(f"{value:.1f}" for value in sorted(seconds)))
    repeated = ", ".join(str(recovery.repeated_steps) for recovery in recoveries)
    report.figure(f"{fault}: steps that were trained again", repeated)
    report.line()
    phases: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for recovery in recoveries:
        for what, pair in recovery.phases.items():
            phases[what].append(pair)
    report.table(f"{fault}: phase of rank 0", "median s", "median processor s")
    for what, pairs in phases.items():
        wall_s, cpu_s = (statistics.median(values) for values in zip(*pairs, strict=True))
        report.row(what, f"{wall_s:.2f}", f"{cpu_s:.2f}")
    report.line()


if __name__ == "__main__":
    main()
