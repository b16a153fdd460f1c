"""A JupyterLab of its own and a Chromium that looks at it."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@dataclass
class Lab:
    """A running server; `folder` is its root, with `notebooks/` in it."""

    url: str
    token: str
    folder: Path


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebook, with configuration, data and runtime folders of its own."""
    folder = tmp_path / "checkout"
    (folder / "notebooks").mkdir(parents=True)
    shutil.copy(ROOT / "notebooks" / "00_workbench.ipynb", folder / "notebooks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    settings = tmp_path / "settings"
    news = settings / "@jupyterlab" / "apputils-extension"
    news.mkdir(parents=True)
    # The question about news would lie over the notebook.
    (news / "notification.jupyterlab-settings").write_text('{"fetchNews": "false", "checkForUpdates": false}')
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("MOE_WORKBENCH_HEADLESS", None)
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.root_dir={folder}", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", "--LabApp.news_url="]
    log = (tmp_path / "lab.log").open("wb")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(f"{url}/api/status?token={token}", timeout=5):
                    break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    pytest.fail((tmp_path / "lab.log").read_text(errors="replace")[-3000:])
                time.sleep(0.2)
        yield Lab(url, token, folder)
    finally:
        log.close()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture
def page(lab: Lab, tmp_path: Path) -> Iterator[Any]:
    """A page with the notebook open in it."""
    from playwright.sync_api import sync_playwright

    if not CHROMIUM:
        pytest.fail("Chromium is not installed; type: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 1500, "height": 1000}, accept_downloads=True)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=lab.url)
        shown = context.new_page()
        shown.set_default_timeout(90_000)
        shown.goto(f"{lab.url}/lab/tree/notebooks/00_workbench.ipynb?reset&token={lab.token}")
        yield shown
        shown.screenshot(path=tmp_path / "last.png")
        browser.close()
