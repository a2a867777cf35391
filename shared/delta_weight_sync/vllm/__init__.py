"""The following half, inside vLLM: from versions in the bucket to live parameters."""

METHOD = "delta_weight_sync"  # what the plugin gives to every worker of vLLM: see `worker`
