"""Experiment trackers: what a run shows outside its folder, fed from the run's log by threads that may fail.

Read `tracker.py` for the protocol, then `feed.py` for who calls it. Each tracker has a file of its own.
"""

from mmtrain.report.trackers.feed import TrackerFeeds
from mmtrain.report.trackers.open_trackers import open_trackers, require_trackers
from mmtrain.report.trackers.tracker import ShownAnswer, TrackedRun, Tracker

__all__ = ["ShownAnswer", "TrackedRun", "Tracker", "TrackerFeeds", "open_trackers", "require_trackers"]
