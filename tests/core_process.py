"""Run the command line as after `pip install mmtrain`, without extras; as on Windows also without what only Unix has.

    python -m tests.core_process windows plan recipes/demo.yaml
    python -m tests.core_process linux plan recipes/demo.yaml

What it hides cannot be imported or does not exist, so that each use of it fails as it would there. As on Windows, no
file is renamed or removed that is open or mapped. Paths and the console stay those of this system.
"""

import contextlib
import errno
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

# Packages of the extras, with what they bring along.
PACKAGES = (
    *("torch", "torchvision", "megatron", "transformers", "einops", "triton", "tensorboard", "flash_attn"),
    *("liger_kernel", "soundfile", "huggingface_hub", "matplotlib", "pillow_heif", "av", "pyarrow", "zmq", "fsspec"),
    *("aiohttp", "scipy", "peft", "diffusers", "tqdm", "filelock", "sympy", "networkx", "pandas"),
    *("wandb", "mlflow", "trackio"),
)
UNIX_MODULES = ("fcntl", "grp", "posix_ipc", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
UNIX_FUNCTIONS = (
    *("chown", "chroot", "confstr", "fchmod", "fchown", "fdatasync", "fork", "forkpty", "getegid", "geteuid", "getgid"),
    *("getgroups", "getloadavg", "getpgid", "getpriority", "getsid", "getuid", "killpg", "lockf", "memfd_create"),
    *("mkfifo", "mknod", "nice", "pathconf", "pipe2", "posix_fadvise", "posix_fallocate", "posix_spawn", "pread"),
    *("preadv", "pwrite", "pwritev", "register_at_fork", "sched_getaffinity", "sched_setaffinity"),
    *("sched_setscheduler", "sendfile", "setpgid", "setsid", "sync", "sysconf", "uname", "wait4", "waitid"),
    *("O_CLOEXEC", "O_DIRECT", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "SCHED_BATCH", "WNOHANG"),
)
UNIX_SIGNALS = (
    *("SIGALRM", "SIGBUS", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP"),
    *("SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGXCPU", "SIGXFSZ", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK"),
    *("alarm", "getitimer", "pthread_kill", "pthread_sigmask", "setitimer", "sigpending", "sigtimedwait", "sigwait"),
)
# What uses some of these itself here, and others on Windows: parts of Python and packages of the core. They are loaded
# before.
STANDARD_MODULES = (
    *(
        "asyncio",
        "logging",
        "mmap",
        "signal",
        "multiprocessing.connection",
        "multiprocessing.pool",
        "multiprocessing.shared_memory",
    ),
    *("multiprocessing.popen_fork", "platform", "random", "selectors", "shutil", "socket", "subprocess", "tempfile"),
    *("tarfile", "uuid", "zipfile", "numpy", "psutil", "typer._click._termui_impl"),
)
UNIX_MMAP = ("MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE", "MADV_WILLNEED")
UNIX_NAMES = {"os": UNIX_FUNCTIONS, "signal": UNIX_SIGNALS, "mmap": UNIX_MMAP}


class _Hidden(importlib.abc.MetaPathFinder):
    """Find nothing where a hidden module is looked for, and keep others from looking."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self._names:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


def hide_packages(names: Sequence[str] = PACKAGES) -> None:
    """Let packages not be found. Raises AssertionError if one is loaded already."""
    assert not {name for name in names if name in sys.modules}
    sys.meta_path.insert(0, _Hidden(names))


def hide_unix() -> None:
    """Hide modules, functions and constants that Windows does not have."""
    for name in STANDARD_MODULES:
        importlib.import_module(name)
    for name in UNIX_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Hidden(UNIX_MODULES))
    for module, names in UNIX_NAMES.items():
        for name in names:
            if hasattr(sys.modules[module], name):
                delattr(sys.modules[module], name)
    for name in ("rename", "replace", "remove", "unlink"):
        setattr(os, name, _refusing_open_files(getattr(os, name)))


def _refusing_open_files(call: Callable[..., None]) -> Callable[..., None]:
    """Let a call raise PermissionError for paths that are open or mapped, or are folders with such files."""

    def checked(*paths: str | os.PathLike[str], **options: int) -> None:
        in_use = _open_paths()
        for path in map(os.path.realpath, paths):
            if any(other == path or other.startswith(f"{path}{os.sep}") for other in in_use):
                raise PermissionError(errno.EACCES, "in use by this process", path)
        call(*paths, **options)

    return checked


def _open_paths() -> set[str]:
    """Return the paths of the files that this process has open or mapped."""
    paths = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself is closed by then
            paths.add(os.readlink(entry.path))
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths.update(line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/"))
    return paths


if __name__ == "__main__":
    system = sys.argv.pop(1)
    hide_packages()
    if system == "windows":
        hide_unix()
    from mmtrain.cli import main

    main()
