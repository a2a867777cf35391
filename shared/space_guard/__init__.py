"""Guards both Spaces: connections, admission, request bodies, settings, logs and the setup page."""
