"""How far a search is, as several searches of one planning run report it together."""

from collections.abc import Callable

Progress = Callable[[int, int], None]  # candidates that are settled, of how many

PERCENT = 100


def progress_of_part(progress: Progress | None, num_before: int, num_searches: int, num_all: int) -> Progress | None:
    """Return the progress of some searches as that of all of them, which count as equally long.

    num_before: searches that are done by then; num_searches: those that report here; num_all: all together.
    """
    if progress is None:
        return None
    report = progress

    def report_part(done: int, total: int) -> None:
        done_searches = num_before + num_searches * done / max(total, 1)
        report(round(PERCENT * done_searches), PERCENT * num_all)

    return report_part
