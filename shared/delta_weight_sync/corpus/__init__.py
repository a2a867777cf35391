"""How the weights of a run change: distances, densities, limits and bytes, version by version."""
