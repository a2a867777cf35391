"""The protocol of delta weight sync: what trainer, replicas and dashboard agree on, and nothing else."""
