"""Trainer states: saved to the bucket, found again and restored, bit for bit."""
