"""`python -m delta_weight_sync`: the same as the command `delta-weight-sync`."""

from delta_weight_sync.cli import main

main()
