"""Checks of settings against each other, and of a recipe against the machine that is to run it.

Start with `cross_checks.CHECKS`, the list that every recipe passes.
"""
