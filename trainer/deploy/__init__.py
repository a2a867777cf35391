"""Deploys a bucket, the environment's Space and the replicas' Spaces to the Hub with one command.

    python -m trainer.deploy up --owner me [--static FOLDER]
    python -m trainer.deploy status | logs SPACE | pause | resume | down --owner me
    python -m trainer.deploy doctor

`plan` computes what a deployment consists of, without any request. `hub` compares the plan with the state of
the Hub and changes only what differs.
"""


class DeployError(RuntimeError):
    """The command failed. The message is one sentence that names the fix and contains no secret."""
