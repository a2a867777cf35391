"""What both Spaces share: checks and limits of requests, settings, and the setup page."""
