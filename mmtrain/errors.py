"""Every error that mmtrain raises on purpose.

    MmtrainError                 exit 1   the run failed
    |-- RunError                 exit 1   something broke while running
    |   |-- CheckpointError      exit 1   a checkpoint is damaged or missing
    |   |-- RankDied             exit 1   a rank was killed
    |   |-- StateCorrupted       exit 1   weights or optimizer state changed although nothing wrote them
    |   |-- EndedBySignal        exit 1   a signal ended what saves nothing
    |   |-- TooManyBadSamples    exit 1   more samples are unusable than data.max_bad_rate allows
    |   |-- PluginError          exit 1   code of another package failed, which the message names
    |   |-- RemoteReadError      exit 1   a remote file cannot be read: outage, denied or changed
    |   |   `-- StorageAwayError exit 1   files cannot be read now, remote or not: a server is away or denies access
    |   `-- FolderTaken          exit 1   another run took over the run's folder
    `-- UserError                exit 2   the input is wrong; the message says what, where and what to do
        |-- RecipeError          exit 2   problems in a recipe, all of them at once
        |-- ModelFolderError     exit 2   a folder with a pretrained model cannot be used
        |   `-- UnknownModelError exit 2   its model is of no family that is known
        |-- DataError            exit 2   a data source cannot be used at all
        |   `-- HostileFileError exit 2   reading a file ended a process, or took more than it may
        |-- PlanError            exit 2   no plan fits, or a plan does not match its recipe or hardware
        |-- ProgramError         exit 2   the checker rejects a program
        `-- LaunchError          exit 2   world size, port or ranks do not fit together

`StoppedAndSaved` (exit 75) is no error but is raised like one: a signal arrived, and the state is on disk.

`RetiredSettingWarning` is a warning: a recipe has a setting that a later version will reject.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class MmtrainError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code = 1


class RunError(MmtrainError):
    """Something broke while running."""


class CheckpointError(RunError):
    """A checkpoint is damaged, incomplete or missing."""


class RankDied(RunError):  # noqa: N818 - names what happened to a rank
    """A rank ended without a word, as one does whose device is gone; `rank` is the first that did."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class StateCorrupted(RunError):  # noqa: N818 - names a state of the run
    """Weights or optimizer state changed although nothing wrote them; `checked_step`: after which they were right."""

    def __init__(self, message: str, checked_step: int) -> None:
        super().__init__(message)
        self.checked_step = checked_step


class EndedBySignal(RunError):  # noqa: N818 - names what happened
    """A signal ended what has nothing to save."""


class TooManyBadSamples(RunError):  # noqa: N818 - names a state of the data
    """More samples are unusable than the recipe's data.max_bad_rate allows."""


class PluginError(RunError):
    """Code of another package failed; the message names the plug-in."""


class RemoteReadError(RunError):
    """A remote file cannot be read for a reason that says nothing about its content: it is never a bad sample."""


class StorageAwayError(RemoteReadError):
    """Files cannot be read at the moment: their server does not answer, or does not let us read now."""


class FolderTaken(RunError):  # noqa: N818 - names a state of the run's folder
    """Another run has taken over the folder of this one, which must not write there any more."""


class UserError(MmtrainError):
    """The input is wrong; the message names what, where, what was found, what is allowed and what to do."""

    exit_code = 2


class RecipeError(UserError):
    """One or more problems in a recipe."""


class ModelFolderError(UserError):
    """A folder with a pretrained model cannot be used."""


class UnknownModelError(ModelFolderError):
    """The folder of a pretrained model holds one of no family that is known."""


class DataError(UserError):
    """A data source cannot be used at all."""


class HostileFileError(DataError):
    """Reading a file ended the process that read it, or took more memory or processor time than reading may take."""


class PlanError(UserError):
    """No plan fits, or a plan does not match its recipe or hardware."""


class ProgramError(UserError):
    """The checker rejects a program; the message names the offending actions."""


class LaunchError(UserError):
    """World size, port or ranks do not fit together."""


class RetiredSettingWarning(FutureWarning):
    """A recipe has a setting that a later version will reject; the message names what replaces it."""


class StoppedAndSaved(MmtrainError):  # noqa: N818 - not an error
    """A signal stopped the run after its state was saved."""

    exit_code = 75


@contextmanager
def writing(option: str, path: Path, what: str) -> Iterator[None]:
    """Turn an OSError inside this context into a UserError: `what` cannot be written to the `path` of `option`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{option} {path}: cannot write the {what}: {error.strerror or error}") from None


def first_lines(problems: Sequence[str], most: int) -> str:
    """Write the first problems below one another, each on an indented line, and how many more there are."""
    lines = [f"\n  {problem}" for problem in problems[:most]]
    if len(problems) > most:
        lines.append(f"\n  and {len(problems) - most} more")
    return "".join(lines)
