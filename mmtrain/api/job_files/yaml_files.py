"""Job files in YAML, with shell scripts inside."""

from collections.abc import Iterable, Mapping, Sequence
from shlex import quote
from typing import Any

import yaml

_TEXT_COLUMNS = 4096  # no line of a script is folded


class _Dumper(yaml.SafeDumper):
    """Writes scripts as they are read, line by line, and repeats what occurs twice."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def yaml_file(comment: Iterable[str], *documents: Mapping[str, Any]) -> str:
    """Return a file of these documents, below a comment of these lines."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment)
    dumped = (
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_TEXT_COLUMNS)
        for document in documents
    )
    return head + "---\n".join(dumped)


def torchrun_script(train: Sequence[str], run_dir: str, *torchrun: str) -> str:
    """Return a script for bash that starts the ranks of one node, and resumes a run that has a checkpoint.

    `train` are the arguments of `mmtrain train`, and `torchrun` are words for the shell. Nodes that start at different
    times agree about a checkpoint, since there is none before all of them have trained.
    """
    words = [*("mmtrain", "train"), *train, "--run-dir", run_dir]
    saved, saved_by_stages = f"{quote(run_dir)}/checkpoints/latest", f"{quote(run_dir)}/*/checkpoints/latest"
    return (
        "set -eu\n"
        f"set -- {' '.join(map(quote, words))}\n"
        f"for saved in {saved} {saved_by_stages}; do\n"
        '    if [ -e "$saved" ]; then\n'
        '        set -- "$@" --resume\n'
        "        break\n"
        "    fi\n"
        "done\n"
        f'exec torchrun {" ".join([*torchrun, "-m"])} "$@"\n'
    )
