"""Small local policies, built from code or installed packages without a model hub."""
