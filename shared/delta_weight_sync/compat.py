"""Which releases of vLLM and TRL this library is tested with.

Both are patched in places that are no public interface, so any other release is refused.
"""

from __future__ import annotations

import importlib
from typing import Final

from delta_weight_sync.errors import CompatibilityError

TESTED: Final = {"vllm": "0.32", "trl": "1.16"}


def require_tested(package: str) -> None:
    """Raise `CompatibilityError` unless the installed release of `package` is the tested one."""
    found, tested = importlib.import_module(package).__version__, TESTED[package]
    if not f"{found}.".startswith(f"{tested}."):
        raise CompatibilityError(
            f"tested with {package} {tested}, found {found}; pip install '{package}=={tested}.*'"
        )


def changed(package: str, what: str) -> CompatibilityError:
    """The error to raise if `what`, which is about to be patched, is not as in the tested release."""
    tested = TESTED[package]
    return CompatibilityError(
        f"{what} is not that of {package} {tested}; pip install '{package}=={tested}.*'"
    )
