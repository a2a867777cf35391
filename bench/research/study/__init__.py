"""A paired study: what staleness costs in learning, and that deltas cost nothing."""
