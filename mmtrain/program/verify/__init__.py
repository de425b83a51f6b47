"""Proofs that a program is complete and cannot deadlock.

Start with `check.check`.
"""
