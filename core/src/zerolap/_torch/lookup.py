"""Finding torch's private names: what is there is handed out as it is, what is missing says so when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from zerolap._torch.names import NAMES, PrivateName
from zerolap.errors import ZerolapError

_BY_PATH = {name.path: name for name in NAMES}


def used(path: str) -> Any:
    """What torch has at ``path``, itself and not wrapped; a stand-in that raises when it is called if there is nothing."""
    try:
        return _resolve(path)
    except (AttributeError, ImportError):
        return _missing(_BY_PATH[path])


def reader(*paths: str) -> Callable[[Any], Any]:
    """Reads attributes of an object, one as it is and several as a tuple, without a Python frame."""
    for path in paths:
        if not is_there(_BY_PATH[path]):
            return _missing(_BY_PATH[path])
    return attrgetter(*(_BY_PATH[path].attribute for path in paths))


def writer(path: str) -> Callable[[Any, Any], None]:
    """Sets an attribute of an object that torch looks at."""
    attribute = _BY_PATH[path].attribute

    def write(target: Any, value: Any) -> None:
        setattr(target, attribute, value)

    return write


def variable(path: str) -> Callable[[], Any]:
    """Reads a variable of a module, which torch sets anew now and then, without a Python frame."""
    module, _, name = path.rpartition(".")
    held = vars(importlib.import_module(module))
    return partial(held.__getitem__, name) if name in held else _missing(_BY_PATH[path])


def text(path: str) -> str:
    """The name alone, for what knows it by its spelling only."""
    return _BY_PATH[path].attribute


def is_there(name: PrivateName) -> bool:
    """Whether this torch has the name: at its path, as an attribute that its class gives to objects, or in a source file."""
    if name.written_in is not None:
        return name.attribute in _source_of(name.written_in)
    try:
        _resolve(name.path)
    except (AttributeError, ImportError):
        return _is_given_to_objects(name)
    return True


def _resolve(path: str) -> Any:
    root, *parts = path.split(".")
    found: Any = importlib.import_module(root)
    for place, part in enumerate(parts, 1):
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, ModuleType):
                raise
            found = importlib.import_module(".".join([root, *parts[:place]]))
    return found


def _is_given_to_objects(name: PrivateName) -> bool:
    """Whether objects have it, but not their class: then the class declares it, or its constructor names it."""
    try:
        owner = _resolve(name.path.rpartition(".")[0])
    except (AttributeError, ImportError):
        return False
    made_by = getattr(getattr(owner, "__init__", None), "__code__", None)
    declared = getattr(owner, "__annotations__", {})
    return name.attribute in declared or (made_by is not None and name.attribute in made_by.co_names)


def _source_of(file: str) -> str:
    """Read, not imported: some are slow to import, or warn."""
    path = Path(torch.__file__).parent / file
    return path.read_text() if path.exists() else ""


def _missing(name: PrivateName) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ZerolapError(
            f"torch {torch.__version__} has no {name.path}: {name.without}. Use a version of torch that zerolap was tested with"
        )

    return refuse
