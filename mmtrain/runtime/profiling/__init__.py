"""Measurements: layer costs, messages, plans run for a few steps, and the state of the machine.

Start with `profile.profile`.
"""
