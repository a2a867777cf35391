"""The whole loop on one machine: `python -m trainer.demo`, or `make demo`."""
