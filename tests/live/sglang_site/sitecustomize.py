"""A stand-in for torchvision, which SGLang imports also for models without images.

A folder with SGLang has no torchvision, because that would bring its own torch.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Module(MagicMock):
    __path__: ClassVar[list[str]] = []
    __all__: ClassVar[list[str]] = []


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "torchvision":
            return None
        frame: Any = sys._getframe()
        while frame := frame.f_back:  # transformers asks whether it is there, and must hear no
            if frame.f_code.co_filename.endswith("import_utils.py") and "available" in frame.f_code.co_name:
                return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> Any:
        module = _Module(name=spec.name)
        module.__name__ = spec.name
        module.__spec__ = spec
        module.__package__ = spec.name
        module.__file__ = __file__
        module.__loader__ = self
        return module

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.append(_Finder())
