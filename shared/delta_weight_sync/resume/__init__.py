"""Trainer states: saves them to the bucket, finds them again and restores them, bit for bit."""
