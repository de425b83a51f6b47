"""Measure layers, messages and whole plans on this machine, and diagnose the machine itself.

Start with `profile.profile`.
"""
