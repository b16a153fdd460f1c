"""Starting the lab: ports, root, ssh, and a notebook that is not there."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from workbench.errors import InvalidInput
from workbench.lab import free_port, notebook_path, server_command, tunnel_line


def test_a_taken_port_is_named_and_without_one_the_next_free_is_found() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidInput, match=f"port: {port} cannot be used on 127.0.0.1"):
            free_port("127.0.0.1", port)
    assert free_port("127.0.0.1", port) == port
    assert 8888 <= free_port("127.0.0.1", None) < 8938
    with pytest.raises(InvalidInput, match="between 1 and 65535"):
        free_port("127.0.0.1", 0)


def test_ssh_prints_the_line_that_brings_the_page_home() -> None:
    environment = {"SSH_CONNECTION": "10.0.0.2 51000 10.0.0.9 2222", "USER": "ada"}
    assert tunnel_line(8890, environment) == "ssh -N -L 8890:127.0.0.1:8890 -p 2222 ada@10.0.0.9"
    assert tunnel_line(8890, {}) is None


def test_root_and_screenless_starts_get_their_flags(tmp_path: Path) -> None:
    notebook = tmp_path / "notebooks" / "00.ipynb"
    command = server_command(notebook, "0.0.0.0", 9999, root=True, screen=False)
    assert "--allow-root" in command
    assert "--no-browser" in command
    assert f"--ServerApp.root_dir={tmp_path}" in command
    assert not [word for word in command if "token" in word.lower()]
    plain = server_command(notebook, "127.0.0.1", 9999, root=False, screen=True)
    assert "--allow-root" not in plain
    assert "--no-browser" not in plain


def test_a_missing_notebook_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"notebook: must be an existing \.ipynb file"):
        notebook_path(tmp_path / "none.ipynb")
