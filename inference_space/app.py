"""`python -m inference_space.app`: runs the vLLM Space with the settings in the environment.

vLLM's engine process imports this module, too, but never calls `main`. So only `main` imports packages.
"""

import logging
import os
import sys

log = logging.getLogger("delta_weight_sync")


def main() -> None:
    """Run the Space until SIGTERM.

    If a setting is missing or wrong, a Space on the Hub serves a setup page, which names the setting. Outside
    of the Hub, the program exits with a message that names the setting. If the folder REPLICA_FOLDER cannot
    be used, the program exits with a message on the Hub, too.
    """
    from delta_weight_sync.errors import DeltaWeightSyncError
    from inference_space.public_port import create_app, listen
    from inference_space.settings import SETUP, Settings, look_at_bucket
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
        setup = SETUP.app(error.problems, lambda: look_at_bucket(os.environ))
        return listen(setup, *Settings.listen_address(os.environ))
    return listen(app, settings.host, settings.port)


if __name__ == "__main__":
    main()
