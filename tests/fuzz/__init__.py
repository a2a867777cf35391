"""A fuzzer of the delta reader: `python -m tests.fuzz --cases N --seed S`."""
