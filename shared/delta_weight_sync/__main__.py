"""`python -m delta_weight_sync`: the console command where it is not on the path."""

from delta_weight_sync.cli import main

main()
