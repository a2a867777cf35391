"""`python -m inference_space.app`: starts the vLLM Space with the settings in the environment, and stops it.

vLLM's engine process imports this module, too. So only `main` imports packages.
"""

import logging
import os
import sys

log = logging.getLogger("delta_weight_sync")


def main() -> None:
    """Start the Space. If a setting is missing or wrong, say which: on the Hub in a web page; elsewhere, and
    for REPLICA_FOLDER always, in the message with which the program exits."""
    from delta_weight_sync.errors import DeltaWeightSyncError
    from inference_space.public_port import create_app, listen
    from inference_space.settings import SETUP, Settings
    from space_guard.setup import SettingsError

    os.umask(0o077)  # files, and the sockets of vLLM's engine in /tmp, are for this user alone
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stdout))
    try:
        settings = Settings.read(os.environ)
        app = create_app(settings)
    except (DeltaWeightSyncError, SettingsError) as error:
        if "SPACE_ID" not in os.environ or isinstance(error, DeltaWeightSyncError):
            sys.exit(f"replica: {error}")
        log.error("replica: %s", SETUP.sentence(error.problems))
        return listen(SETUP.app(error.problems), *Settings.listen_address(os.environ))
    return listen(app, settings.host, settings.port, settings.key)


if __name__ == "__main__":
    main()
