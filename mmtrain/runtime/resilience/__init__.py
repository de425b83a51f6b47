"""Start ranks and end them together; detect hangs, stragglers and lost peers, and explain failures.

Start with `launch.launch_local`, then read `failures`.
"""
