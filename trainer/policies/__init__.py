"""Small policies that are built from code or from installed packages, without a model hub."""
