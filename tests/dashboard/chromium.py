"""The browser under its former name, for bench/dashboard.py."""

from tests.browser import chromium, installed

__all__ = ["chromium", "installed"]
