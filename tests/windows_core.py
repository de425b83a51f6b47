"""Run the command line as on Windows after `pip install mmtrain`: without extras, and without what only Unix has.

    python -m tests.windows_core plan recipes/demo.yaml

What it hides cannot be imported or does not exist, so that each use of it fails as it would there. Paths, file locks
and the console stay those of this system.
"""

import importlib
import importlib.abc
import importlib.machinery
import mmap
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

# Packages of the extras, with what they bring along.
PACKAGES = (
    *("torch", "torchvision", "megatron", "transformers", "einops", "triton", "tensorboard", "flash_attn"),
    *("liger_kernel", "soundfile", "huggingface_hub", "matplotlib", "pillow_heif", "av", "pyarrow", "zmq", "fsspec"),
    *("aiohttp", "scipy", "peft", "diffusers", "tqdm", "filelock", "sympy", "networkx"),
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
    *("SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGXFSZ", "SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK"),
    *("alarm", "getitimer", "pthread_kill", "pthread_sigmask", "setitimer", "sigpending", "sigtimedwait", "sigwait"),
)
# What uses some of these itself here, and others on Windows: parts of Python and packages of the core. They are loaded
# before.
STANDARD_MODULES = (
    *("asyncio", "logging", "multiprocessing.connection", "multiprocessing.pool", "multiprocessing.shared_memory"),
    *("multiprocessing.popen_fork", "platform", "random", "selectors", "shutil", "socket", "subprocess", "tempfile"),
    *("tarfile", "uuid", "zipfile", "numpy", "psutil", "click._termui_impl"),
)
UNIX_MMAP = ("MAP_PRIVATE", "MAP_SHARED", "PROT_READ", "PROT_WRITE", "MADV_WILLNEED")


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


def hide(packages: Sequence[str] = PACKAGES) -> None:
    """Hide packages, and modules, functions and constants that Windows does not have."""
    for name in STANDARD_MODULES:
        importlib.import_module(name)
    for name in (*packages, *UNIX_MODULES):
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Hidden((*packages, *UNIX_MODULES)))
    for module, names in ((os, UNIX_FUNCTIONS), (signal, UNIX_SIGNALS), (mmap, UNIX_MMAP)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)


if __name__ == "__main__":
    hide()
    from mmtrain.cli import main

    main()
