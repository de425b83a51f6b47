"""Proofs about a program: it is complete, cannot deadlock and, given a limit, fits into memory.

Read `check.check_program` first. `matching` joins sends with receives and ranks with their collectives, `deadlock`
looks for cycles among them, `live_activations` counts memory, and `send_window` how many sends may be under way.
"""
