"""Saves trainer states to the bucket, finds them again, and restores them bit for bit."""
