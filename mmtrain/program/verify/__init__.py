"""Proofs about a program: it is complete, cannot deadlock and, given a limit, fits into memory.

Read `check.check_program` first. `deadlock` looks for cycles among matched messages and collectives, and finds how many
sends may be under way. `live_activations` counts memory.
"""
