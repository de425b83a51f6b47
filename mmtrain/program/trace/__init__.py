"""Timelines, simulated or measured, and the idle time that they show.

Read `timeline.Timeline` first. `step_record` is what a rank measured in a step, `measured_timeline` turns the records
of all ranks into a timeline, `bubble_accounting` sorts idle time by kind.
"""
