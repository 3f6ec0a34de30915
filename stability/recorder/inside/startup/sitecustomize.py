"""Loads the recorder into a process that is started with this folder first on PYTHONPATH.

Python imports a module of this name as it starts. Another one of the same name, which this one
hides, is executed next, so that it may import torch or fail: Python tells of its error, as ever.
"""

import importlib.util
import os
import sys
import types
from importlib.machinery import PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "_stability_recorder"


def _load(name, file, folders=None):
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _chain():
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _start():
    inside = os.path.dirname(_HERE)
    _load(_PACKAGE, os.path.join(inside, "__init__.py"), [inside])
    # of these rooms only what says so in its docstring can be loaded here
    for room in ("probe", "records"):
        package = types.ModuleType(_PACKAGE + "." + room)
        package.__path__ = [os.path.join(os.path.dirname(os.path.dirname(inside)), room)]
        sys.modules[package.__name__] = package
    importlib.import_module(_PACKAGE + ".start").start()


# another one may chain in its turn, and so execute this once more
if os.environ.get("STABILITY_SPOOL") and _PACKAGE not in sys.modules:
    _start()
_chain()
