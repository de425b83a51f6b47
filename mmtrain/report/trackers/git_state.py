"""The git state of the working folder, so that a tracker's run can be reproduced."""

import subprocess
from pathlib import Path

GIT_TIMEOUT_S = 10.0  # a work tree on slow storage
_COMMIT, _BRANCH = "commit", "branch"
MAX_CHANGED_FILES = 20  # named; more say that the tree is not the commit's in any case


def read_git_state(folder: Path) -> dict[str, str]:
    """Return commit, branch and changed files of the work tree around `folder`; empty where there is none, or no git.

    The addresses of remotes are left out: they may hold tokens, and the commit says more.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = (_git(folder, "status", "--porcelain", "--untracked-files=no") or "").splitlines()
    state = {_COMMIT: commit, _BRANCH: _git(folder, "rev-parse", "--abbrev-ref", "HEAD") or "", "changed": "no"}
    if changed:
        names = [line[3:] for line in changed]
        rest = f" and {len(names) - MAX_CHANGED_FILES} more" if len(names) > MAX_CHANGED_FILES else ""
        state["changed"] = ", ".join(names[:MAX_CHANGED_FILES]) + rest
    return state


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.rstrip() if done.returncode == 0 else None
