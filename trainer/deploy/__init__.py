"""From zero to Spaces: one command makes the bucket, the environment's Space and the replicas' Spaces.

    python -m trainer.deploy up --owner me
    python -m trainer.deploy status | logs SPACE | pause | resume | down --owner me
    python -m trainer.deploy doctor

A pure plan says what there should be (`plan.py`); `apply.py` compares it with what there is and changes only
what differs. Everything goes through huggingface_hub's own functions.
"""
