"""The browser under its former name, for tests/live."""

from tests.browser import chromium, watched_page

__all__ = ["chromium", "watched_page"]
