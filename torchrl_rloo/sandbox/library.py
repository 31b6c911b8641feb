"""Files that sandboxed programs may read: the standard library without packages, and its shared libraries.

:mod:`torchrl_rloo.sandbox.starter` loads this module without site-packages. Landlock cannot exclude files of
an allowed folder. So the parts of the library's folder are allowed one by one, and programs cannot list the folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import zoneinfo
from importlib.machinery import FileFinder
from pkgutil import get_importer

# Parts of the library's folder that are not modules. The top-level compiled files are in __pycache__
_PARTS = {"__pycache__", "lib-dynload"}
_PACKAGES = {"ensurepip"}  # holds pip
_DYNLOAD = "lib-dynload"
# Loaded only in the middle of a program: by the end of a thread, by ctypes
_LATE_LIBRARIES = ("libgcc_s.so.1", "libm.so.6")
_DATA = ("/etc/ld.so.cache", "/usr/lib/locale", *zoneinfo.TZPATH)


def readable_paths() -> list[str]:
    """Return the files and folders that an interpreter without site-packages reads."""
    return [*standard_library(), *shared_libraries(), *_DATA]


def standard_library() -> list[str]:
    """Return the parts of the folders in ``sys.path`` that belong to the standard library."""
    names = (sys.stdlib_module_names | _PARTS) - _PACKAGES
    found = []
    for place in sys.path:
        if not os.path.isdir(place):  # the zipped library
            found.append(place)
        elif os.path.basename(place) == _DYNLOAD:
            found.append(place)
        else:
            stems = {entry: entry.partition(".")[0] for entry in os.listdir(place)}
            found += [
                os.path.join(place, entry)
                for entry, stem in stems.items()
                if stem in names or stem.startswith("_sysconfigdata_")
            ]
    return found


def shared_libraries() -> list[str]:
    """Return the shared libraries of the interpreter and of its extension modules, which a child process loads."""
    folders = [place for place in sys.path if os.path.basename(place) == _DYNLOAD and os.path.isdir(place)]
    modules = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            for module in [*modules, *_LATE_LIBRARIES]:
                with contextlib.suppress(OSError):  # its own libraries are not installed
                    ctypes.CDLL(module, mode=os.RTLD_LAZY)
            with open("/proc/self/maps") as maps, open(write, "w") as pipe:
                paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/") > 0}
                pipe.write("\n".join(path for path in paths if ".so" in os.path.basename(path)))
        finally:
            os._exit(0)
    os.close(write)
    with open(read) as pipe:
        libraries = pipe.read().splitlines()
    os.waitpid(pid, 0)
    return sorted(libraries)


def pin_finders() -> None:
    """Read the folders of ``sys.path`` now and never again, because programs cannot list them."""
    for place in sys.path:
        finder = get_importer(place)
        if isinstance(finder, FileFinder):
            finder.find_spec("sys")  # reads the folder
            finder._fill_cache = lambda: None
