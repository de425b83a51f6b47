"""What keeps a run safe: launching, signals, the watchdog, failure reports, stragglers.

Start with `launch.launch_local` and `failures`.
"""
