"""Deploys a bucket, the environment's Space and the replicas' Spaces to the Hub with one command.

    python -m trainer.deploy up --owner me
    python -m trainer.deploy status | logs SPACE | pause | resume | down --owner me
    python -m trainer.deploy doctor

`plan` says what a deployment consists of, and contacts nothing. `hub` compares the plan with the state of the
Hub and changes only what differs.
"""


class DeployError(RuntimeError):
    """The command cannot go on; the message is one sentence that names the fix and holds no secret."""
