"""Which folders tuned configurations are read from: those given in the program, the environment's, the package's."""

from __future__ import annotations

import os
from pathlib import Path

ENV = "MOE_WORKBENCH_CONFIG_DIR"
PACKAGED = Path(__file__).parent / "configs"
_added: list[Path] = []


def add_config_folder(folder: str | os.PathLike[str]) -> None:
    """Read tuned configurations from a folder, before the environment's folders and the package's own.

    It holds SGLang's layout (files in ``triton_x_y_z`` or in ``configs/triton_x_y_z``) or vLLM's flat one. Of several
    folders the first added wins; adding one again changes nothing.

    Raises:
        ValueError: it is no folder.
    """
    path = _absolute(folder)
    if not path.is_dir():
        raise ValueError(f"folder must be an existing folder; got {os.fspath(folder)!r}.")
    if path not in _added:
        _added.append(path)


def remove_config_folder(folder: str | os.PathLike[str]) -> None:
    """Take back ``add_config_folder``.

    Raises:
        ValueError: it was not added.
    """
    path = _absolute(folder)
    if path not in _added:
        names = ", ".join(map(str, _added)) or "none"
        raise ValueError(f"folder must be one that was added ({names}); got {os.fspath(folder)!r}.")
    _added.remove(path)


def config_folders() -> tuple[Path, ...]:
    """The folders given by the user, in the order in which they are read; the package's own comes after them."""
    given = os.environ.get(ENV)
    if not given:
        return tuple(_added)
    return tuple(dict.fromkeys((*_added, *(_absolute(word) for word in given.split(os.pathsep) if word))))


def _absolute(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.path.expanduser(folder)))  # not resolve(): a link may change its target
