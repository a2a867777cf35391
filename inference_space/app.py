"""`python -m inference_space.app`: the vLLM Space, with the settings in the environment.

Nothing is imported up here: the process of vLLM's engine imports this module again.
"""

from __future__ import annotations


def main() -> None:
    """Start the Space."""
    from inference_space.face import serve

    serve()


if __name__ == "__main__":
    main()
