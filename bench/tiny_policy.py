"""The name under which `bench.gpu_check` imports the tiny policy of the tests."""

from tests.support.tiny_policy import build

__all__ = ["build"]
