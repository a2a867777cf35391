"""The publishing half: from live parameters to versions in the bucket."""
