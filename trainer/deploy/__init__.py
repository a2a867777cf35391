"""Deploys a bucket, the environment's Space and the replicas' Spaces to the Hub with one command.

`plan` computes what a deployment consists of, without any request. `hub` sets all of it on the Hub, and
compares nothing with the state of the Hub.
"""


class DeployError(RuntimeError):
    """The command failed. The message is one sentence that names the fix and contains no secret."""
