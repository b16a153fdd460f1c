"""The panel as a person meets it: JupyterLab in Chromium. Waits are on text in the page, never on time alone."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(540)]

# Points of latency lines, and rows of the speed-up matrix, that the page's own figures hold.
DRAWN = """() => {
  let points = 0, rows = 0;
  for (const plot of document.querySelectorAll('.moewb .js-plotly-plot'))
    for (const trace of plot.data) {
      if (trace.visible !== true) continue;
      if (trace.type === 'heatmap' && trace.texttemplate) rows += trace.z.length;
      if (trace.mode === 'lines+markers') points += Array.from(trace.y).filter(y => y > 0).length;
    }
  return [points, rows];
}"""


def wait_state(page: Any, *states: str, timeout: float = 240_000) -> str:
    """Wait until the panel's state is one of `states`."""
    page.wait_for_function(
        "states => states.includes((document.querySelector('.moewb-state')||{}).innerText?.trim())",
        arg=list(states),
        timeout=timeout,
    )
    return str(page.locator(".moewb-state").inner_text()).strip()


def toggle(page: Any, word: str) -> Any:
    """The toggle of a mode, by its word."""
    return page.locator(".moewb-toggles button", has_text=word).first


def press(page: Any, name: str) -> None:
    """Press a button of the panel."""
    page.locator(".moewb button", has_text=name).first.click()


def test_toggle_run_stop_freeze_export_in_jupyterlab(lab: Any, page: Any, tmp_path: Path) -> None:
    page.locator(".jp-MarkdownOutput h1", has_text="MoE workbench").wait_for()
    page.locator("#jp-bottom-panel, .jp-StatusBar-Widget").filter(has_text="| Idle").first.wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).first.click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    page.locator(".moewb-state").wait_for()
    assert wait_state(page, "idle") == "idle"
    page.locator(".js-plotly-plot").nth(1).wait_for()

    source = page.locator(".moewb select").first
    if source.locator("option").count() > 1:  # recordings were opened, as there is no GPU
        recorded = page.locator(".moewb-plan").inner_text()
        source.select_option(index=0)  # live
        page.wait_for_function("old => document.querySelector('.moewb-plan').innerText !== old", arg=recorded)
    triton = toggle(page, "triton")
    shown = page.locator(".moewb-why").all_inner_texts()
    assert triton.is_disabled() == any(why.startswith("triton: ") for why in shown)
    before = page.locator(".moewb-plan").inner_text()
    toggle(page, "fp32").click()
    page.wait_for_function("old => document.querySelector('.moewb-plan').innerText !== old", arg=before)
    assert "Plan: 6 points" in page.locator(".moewb-plan").inner_text()

    press(page, "Run")
    assert wait_state(page, "done", "failed", "timed_out", "cancelled") == "done"
    assert "6 ok" in page.locator(".moewb").inner_text()
    page.wait_for_function(f"() => JSON.stringify(({DRAWN})()) === '[6,2]'")

    press(page, "Freeze")
    page.locator(".moewb-files", has_text="freeze.html").wait_for()
    page.locator(".jp-OutputArea-output table", has_text="median latency at tokens").first.wait_for()
    press(page, "Export")
    page.locator(".moewb-files a").first.wait_for()
    with page.expect_download() as download:
        page.locator(".moewb-files a").first.click()
    download.value.save_as(tmp_path / "all.zip")
    names = {Path(name).name for name in zipfile.ZipFile(tmp_path / "all.zip").namelist()}
    assert names == {"records.jsonl", "records.parquet", "records.csv", "summary.md", "report.html"}
    folder = lab.folder / "results" / "quick"
    assert names | {"freeze.html"} <= {path.name for path in folder.iterdir()}
    assert len((folder / "records.jsonl").read_text().splitlines()) >= 6
    shot = Path(os.environ.get("MOE_WORKBENCH_SCREENSHOT", str(tmp_path / "panel.png")))
    page.set_viewport_size({"width": 1500, "height": 1700})
    page.locator(".moewb").screenshot(path=shot)
    page.set_viewport_size({"width": 1500, "height": 1000})
    assert shot.stat().st_size > 20_000

    toggle(page, "default").click()
    toggle(page, "1,024").click()
    page.locator(".moewb-stale", has_text="stale").wait_for()
    press(page, "Run")
    wait_state(page, "starting", "compiling", "warming", "checking", "measuring")
    press(page, "Stop")
    assert wait_state(page, "cancelled", "done", timeout=60_000) == "cancelled"
    assert (lab.folder / "results" / "quick-2" / "records.jsonl").exists()

    page.keyboard.press("Control+s")
    page.wait_for_function("() => !document.querySelector('.jp-mod-dirty')")
    saved = json.loads((lab.folder / "notebooks" / "00_workbench.ipynb").read_text())
    kinds = [kind for cell in saved["cells"] for out in cell.get("outputs", []) for kind in out.get("data", {})]
    assert "application/vnd.plotly.v1+json" in kinds  # Freeze is in the file, so that it shows without a kernel
    errors = [out for cell in saved["cells"] for out in cell.get("outputs", []) if out["output_type"] == "error"]
    assert errors == []
