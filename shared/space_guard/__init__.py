"""What both Spaces share: the guard in front of their apps, the server, settings, and the setup page."""
