"""Start JupyterLab on the workbench's notebook, or run that notebook to its end without a screen."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from workbench.errors import InvalidInput

DEFAULT_PORT = 8888
PORTS_TRIED = 50


def notebook_path(given: Path | None = None) -> Path:
    """The notebook to open: `given`, else `notebooks/00_workbench.ipynb` of this checkout or of the current folder.

    Raises:
        InvalidInput: no such file.
    """
    name = Path("notebooks") / "00_workbench.ipynb"
    candidates = [given] if given else [Path(__file__).parent.parent / name, Path.cwd() / name]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    raise InvalidInput(f"notebook: must be an existing .ipynb file, not {str(candidates[-1])!r}")


def free_port(ip: str, asked: int | None) -> int:
    """The port to listen on: `asked` or nothing else; without one, the first free port from 8888 on.

    Raises:
        InvalidInput: `asked` is taken or is no port, or no port is free.
    """
    if asked is not None and not 1 <= asked <= 65535:
        raise InvalidInput(f"port: must be between 1 and 65535, not {asked}")
    for port in [asked] if asked is not None else range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((ip if ip != "*" else "", port))
            except OSError as error:
                if asked is not None:
                    raise InvalidInput(
                        f"port: {asked} cannot be used on {ip} ({error.strerror}); give another"
                    ) from None
                continue
            return port
    raise InvalidInput(f"port: none of {DEFAULT_PORT} to {DEFAULT_PORT + PORTS_TRIED - 1} is free; give another")


def tunnel_line(port: int, environment: dict[str, str]) -> str | None:
    """The `ssh` command that brings the lab to the user's own machine; None when this is no ssh session."""
    connection = environment.get("SSH_CONNECTION", "").split()
    if len(connection) < 4:
        return None
    user = environment.get("USER") or environment.get("LOGNAME") or "USER"
    ssh_port = f" -p {connection[3]}" if connection[3] != "22" else ""
    return f"ssh -N -L {port}:127.0.0.1:{port}{ssh_port} {user}@{connection[2]}"


def server_command(notebook: Path, ip: str, port: int, *, root: bool, screen: bool) -> list[str]:
    """The JupyterLab command: rooted at the notebook's checkout, guarded by the token that Jupyter makes."""
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        str(notebook),
        f"--ServerApp.ip={ip}",
        f"--ServerApp.port={port}",
    ]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={notebook.parent.parent}"]
    command += ["--allow-root"] if root else []
    command += [] if screen else ["--no-browser"]
    return command


def start_lab(notebook: Path | None = None, *, ip: str = "127.0.0.1", port: int | None = None) -> int:
    """Run JupyterLab in the foreground until it ends; returns its exit status.

    Raises:
        InvalidInput: no notebook, a port that cannot be used, or JupyterLab is not installed.
    """
    if find_spec("jupyterlab") is None or find_spec("ipywidgets") is None:
        raise InvalidInput("lab: JupyterLab and ipywidgets are not installed; type: pip install 'moe-workbench[lab]'")
    path = notebook_path(notebook)
    chosen = free_port(ip, port)
    tunnel = tunnel_line(chosen, dict(os.environ))
    if tunnel:
        print(f"Over ssh: on your own machine type\n    {tunnel}\nthen open the address below there.", flush=True)
    screen = tunnel is None and bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"
    )
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    command = server_command(path, ip, chosen, root=root, screen=screen)
    print(shlex.join(command), flush=True)
    try:
        return subprocess.run(command, check=False).returncode
    except KeyboardInterrupt:
        return 130
