"""Deferred import of vLLM in TorchRL, which takes 6 s of CPU time.

``torchrl.envs`` imports TorchRL's ``vLLMWrapper``, and with it vLLM. ``torchrl_rloo`` installs an import finder before
that. The finder makes TorchRL import ``vLLMWrapper`` on first use, then removes itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from types import ModuleType

_LLM = "torchrl.modules.llm"
_POLICIES = f"{_LLM}.policies"
_WRAPPER = f"{_POLICIES}.vllm_wrapper"
_NAME = "vLLMWrapper"


class _Placeholder(ModuleType):
    """Placeholder for TorchRL's ``vllm_wrapper`` while one thread runs the packages that import it."""

    def __init__(self) -> None:
        super().__init__(_WRAPPER)
        self.owner = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if threading.get_ident() == self.owner:
            if name == _NAME:
                return None
            raise AttributeError(name)
        importlib.import_module(_LLM)  # other threads wait here for the import lock
        return getattr(importlib.import_module(_WRAPPER), name)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader of ``torchrl.modules.llm`` without vLLM."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[_WRAPPER] = _Placeholder()
        try:
            super().exec_module(module)
        finally:
            del sys.modules[_WRAPPER]
        for package in (module, sys.modules.get(_POLICIES)):
            if package is not None and _NAME in vars(package):
                _import_on_first_use(package)
        sys.meta_path.remove(_finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that loads ``torchrl.modules.llm`` with :class:`_Loader`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != _LLM:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def _import_on_first_use(package: ModuleType) -> None:
    """Replace ``vLLMWrapper`` in a package by a module ``__getattr__`` that imports it."""
    others = vars(package).get("__getattr__")

    def lookup(name: str) -> object:
        if name == _NAME:
            return getattr(importlib.import_module(_WRAPPER), name)
        if others is not None:
            return others(name)
        raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")

    del vars(package)[_NAME]
    vars(package)["__getattr__"] = lookup


_finder = _Finder()
if _LLM not in sys.modules:
    sys.meta_path.insert(0, _finder)
