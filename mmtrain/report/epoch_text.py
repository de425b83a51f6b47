"""How long a run is, in the words of its user: epochs, steps, samples, and hours."""

from mmtrain.report.run_cost import number_text

_UNITS_S = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))


def epoch_text(
    steps_per_epoch: float, samples_per_step: float, num_steps: int, step_time_s: float | None = None
) -> str:
    """Write what an epoch and all steps are; step_time_s: of a step, in seconds.

    `One epoch is 5,195 steps of 128 samples; 5,195 steps are 1.00 epochs and take 3 hours 20 minutes, 55.3 samples/s.`
    """
    plural = "s" * (round(steps_per_epoch) != 1)
    epoch = f"One epoch is {number_text(steps_per_epoch)} step{plural} of {number_text(samples_per_step)} samples"
    epochs = num_steps / steps_per_epoch
    run = f"{num_steps:,} steps are {epochs:.2f} epochs" if num_steps > 1 else f"1 step is {epochs:.2f} epochs"
    if step_time_s is None:
        return f"{epoch}; {run}."
    takes = "take" if num_steps > 1 else "takes"
    rate = number_text(samples_per_step / step_time_s)
    return f"{epoch}; {run} and {takes} {duration_text(num_steps * step_time_s)}, {rate} samples/s."


def duration_text(seconds: float) -> str:
    """Write a time in its two largest units.

    >>> duration_text(12_000), duration_text(93_600), duration_text(61.4), duration_text(0.2)
    ('3 hours 20 minutes', '1 day 2 hours', '1 minute 1 second', 'less than a second')
    """
    rest = round(seconds)
    counts = []
    for name, unit_s in _UNITS_S:
        count, rest = divmod(rest, unit_s)
        counts.append((name, count))
    first = next((place for place, (_, count) in enumerate(counts) if count), None)
    if first is None:
        return "less than a second"
    return " ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts[first : first + 2] if count)
