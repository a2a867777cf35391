"""Settings of the whole suite."""

from hypothesis import settings

# The first call of a compiled kernel takes a second, later ones microseconds: deadlines would only be noise.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
