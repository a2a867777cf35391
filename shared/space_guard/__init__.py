"""Guards both Spaces: requests and their limits, settings and the setup page."""
