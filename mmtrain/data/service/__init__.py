"""Producers: machines that prepare steps for trainers elsewhere, over ZeroMQ.

Start with `producer.Producer` and `remote_steps`, the two ends of `protocol`.
"""
