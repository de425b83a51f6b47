"""Start a SLURM cluster of two nodes on this machine, for tests: Debian's `slurm-wlm` and `munge`, as root.

Everything that it writes is in one folder of its own, and it listens at ports of its own, so it disturbs no SLURM that
this machine belongs to.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from mmtrain.runtime.resilience.launch import free_port
from tests.waiting import MAX_WAIT_S, poll

NODES = ("127.0.0.1", "127.0.0.2")  # names that every machine resolves
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CORES_PER_NODE = 4  # that SLURM gives out, whatever this machine has
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"}

_CONFIG = """\
ClusterName=mmtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=sched_interval=1,batch_sched_delay=1,sched_min_interval=0,bf_interval=2
SchedulerTimeSlice=5
ReturnToService=2
SlurmdTimeout=10
InactiveLimit=0
KillWait=60
MinJobAge=300
Waittime=0
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_slurm() -> str | None:
    """Return why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "a cluster of SLURM can be started by root only"
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"needs Debian's slurm-wlm and munge; not found: {', '.join(missing)}" if missing else None


_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """A controller and two nodes; `with` starts and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: dict[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
        }
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "-D", "-i")
            for node in NODES:
                self.start_node(node)
            poll(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        ours = [p for p in psutil.process_iter() if _variable(p, "SLURM_CONF") == self.env["SLURM_CONF"]]
        for process in ours:  # step daemons and tasks outlive slurmd
            with contextlib.suppress(psutil.Error):
                process.kill()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        self._daemons.clear()

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        ports = [free_port() for _ in range(1 + len(NODES))]
        lines = _CONFIG.format(folder=self.folder, host=host, controller_port=ports[0])
        for node, port in zip(NODES, ports[1:], strict=True):
            lines += (
                f"NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} "
                f"CPUs={CORES_PER_NODE} RealMemory=1000 State=UNKNOWN\n"
            )
            (self.folder / f"spool-{node}").mkdir()
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(lines)
        self.folder.chmod(0o755)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        places = [f"--{option}={self.folder}/munge.{end}" for option, end in files.items()]
        self._start("munged", "--foreground", "--force", f"--key-file={key}", *places)
        poll((self.folder / "munge.socket").exists)

    def start_node(self, node: str) -> None:
        """Start a node's daemon."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Let a node vanish: its daemon and everything that it has started."""
        daemon = psutil.Process(self._daemons[node].pid)
        # Step daemons and tasks are no children of slurmd: they carry the node's name.
        for process in [daemon, *self._of_node(node)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._daemons.pop(node).wait()

    def tasks(self, node: str) -> list[psutil.Process]:
        """Return what step daemons have started as tasks of a node."""
        of_node = [p for p in self._of_node(node) if _variable(p, "SLURM_STEP_NUM_TASKS") is not None]
        return [p for p in of_node if _name(_parent(p)) == "slurmstepd"]

    def run(self, *command: str, **variables: str) -> str:
        """Run a client of SLURM; return what it prints."""
        done = subprocess.run(
            command, env=self.env | variables, capture_output=True, text=True, timeout=MAX_WAIT_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *arguments: str, **variables: str) -> str:
        """Queue a batch job; return its number."""
        return self.run("sbatch", "--parsable", *arguments, **variables).strip()

    def job(self, number: str) -> Mapping[str, str]:
        """Return what SLURM says of a job: JobState, Restarts, ExitCode ..."""
        words = self.run("scontrol", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str) -> Mapping[str, str]:
        """Wait until a job has ended, restarts included."""
        poll(lambda: self.job(number)["JobState"] in ENDED)
        return self.job(number)

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None
        log = (self.folder / f"{name or program}.out").open("ab")
        with log:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _of_node(self, node: str) -> list[psutil.Process]:
        """Return the tasks, scripts and step daemons of a node."""
        of_node = [p for p in psutil.process_iter() if self._is_of(p, node)]
        parents = [parent for p in of_node if (parent := _parent(p)) is not None]
        daemons = {p.pid: p for p in parents if _name(p) == "slurmstepd"}
        return [*daemons.values(), *of_node]

    def _is_of(self, process: psutil.Process, node: str) -> bool:
        return (_variable(process, "SLURMD_NODENAME"), _variable(process, "SLURM_CONF")) == (
            node,
            self.env["SLURM_CONF"],
        )


def _parent(process: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.Error):
        return process.parent()
    return None


def _name(process: psutil.Process | None) -> str:
    with contextlib.suppress(psutil.Error):
        return process.name() if process is not None else ""
    return ""


def _variable(process: psutil.Process, name: str) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name)
    return None
