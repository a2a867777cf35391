"""The Wordle environment Space: a pure-Python game engine behind a small HTTP API."""
