"""`make bench`: what this project costs, measured side by side with what it replaces.

    python -m bench                     every section, then the plot
    python -m bench --only size,speed   some sections; the others keep their figures in results.json
    python -m bench.readme              writes the tables of docs/benchmarks.md from results.json

Each section is a module with `run(results)`, runs in a process of its own on one thread, and fills one key of
`bench/results.json`. Ratios compare figures of the same run; absolute ones are of a shared, noisy machine.

No code measures the sections `growth` and `threads` any more; commits a322e1fc and 7f1d3cf6 did. Their
figures stay as data: `delta_weight_sync/cost.py` is fitted to them, and `tests/library/test_cost.py` compares
them.
"""
