"""Faults of every kind against real publishers and followers; `python -m tests.chaos --help`."""
