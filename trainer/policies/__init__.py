"""Small local policies, built from code or installed packages: no model hub needed."""
