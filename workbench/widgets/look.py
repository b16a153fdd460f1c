"""How the widgets look: one small style sheet, and HTML fragments in which every text is escaped."""

from __future__ import annotations

import html
from typing import Any

import ipywidgets

LABEL_WIDTH = "76px"

# A live figure is drawn before it has a place in the page and takes a default width; it then only listens to the
# window. So a change of the panel's own size is told to the window.
_FIT = (
    "setTimeout(() => document.querySelectorAll('.moewb').forEach(panel => { if (panel.fits) return; let timer;"
    " panel.fits = new ResizeObserver(() => { clearTimeout(timer);"
    " timer = setTimeout(() => window.dispatchEvent(new Event('resize')), 120); });"
    " panel.fits.observe(panel); }), 50)"
)
CSS = (
    f'<style onload="{html.escape(_FIT)}">'
    + """
.moewb { font-variant-numeric: tabular-nums; max-width: 1240px; }
.moewb .widget-html-content { line-height: 1.4; }
.moewb-label .widget-html-content { color: var(--jp-ui-font-color2, #555); text-align: right; }
.moewb-row { align-items: flex-start; }
.moewb-toggles { flex-flow: row wrap; }
.moewb-toggles .jupyter-button { width: auto; min-width: 44px; height: 26px; line-height: 24px; padding: 0 10px;
  margin: 1px 4px 1px 0; border: 1px solid #c9ced6; border-radius: 4px; background: #fff; color: #222;
  box-shadow: none; }
.moewb-toggles .jupyter-button.mod-active { background: #0b5cad; border-color: #0b5cad; color: #fff; }
.moewb-toggles .jupyter-button:disabled { background: #f1f1f1; color: #8a8a8a; border: 1px dashed #c9ced6; opacity: 1;
  text-decoration: line-through; }
.moewb-toggles .jupyter-button.mod-active:disabled { background: #b9cbe0; color: #333; }
.moewb-switch .jupyter-button { height: 26px; line-height: 24px; border: 1px solid #c9ced6; background: #fff;
  color: #222; box-shadow: none; }
.moewb-switch .jupyter-button.mod-active { background: #0b5cad; border-color: #0b5cad; color: #fff; }
.moewb-why .widget-html-content { font-size: 12px; color: #8a4b00; line-height: 1.35; }
.moewb-field input { height: 26px; }
.moewb-plan .widget-html-content { font-size: 13px; }
.moewb-state .widget-html-content { font-weight: 600; text-align: center; border-radius: 4px; background: #eef1f5;
  padding: 2px 10px; min-width: 84px; }
.moewb-error .widget-html-content { background: #fdecea; color: #7a1410; border-left: 4px solid #c62828;
  padding: 6px 10px; white-space: pre-wrap; overflow-wrap: anywhere; }
.moewb-stale .widget-html-content { color: #8a4b00; font-weight: 600; }
.moewb .moewb-copy { position: relative; margin: 2px 0 6px; }
.moewb .moewb-copy pre { margin: 0; padding: 7px 64px 7px 10px; background: #f6f7f9; border: 1px solid #e3e6ea;
  border-radius: 4px; font-size: 12px; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
.moewb .moewb-copy button { position: absolute; top: 5px; right: 5px; font-size: 11px; padding: 1px 8px;
  cursor: pointer; border: 1px solid #c9ced6; border-radius: 4px; background: #fff; color: #222; }
.moewb-files .widget-html-content a { margin-right: 14px; text-decoration: underline; }
.moewb-progress .progress { height: 14px; border-radius: 4px; }
.moewb-figure > * { min-width: 0; width: 100%; height: 100%; flex: 1 1 auto; overflow: hidden; margin: 0; }
.moewb hr { border: 0; border-top: 1px solid #e3e6ea; margin: 6px 0; }
</style>"""
)


def text(value: str = "", *, css: str = "", **layout: Any) -> Any:
    """An `HTML` widget that takes the width it is given and no more height than its text."""
    widget = ipywidgets.HTML(value, layout=ipywidgets.Layout(margin="0", **layout))
    if css:
        widget.add_class(css)
    return widget


def label(words: str, width: str | None = LABEL_WIDTH) -> Any:
    """The name of a row, right-aligned in a column of its own; with `width=None` as wide as its words."""
    sizes = {"width": width, "min_width": width} if width else {"width": "auto", "min_width": "60px"}
    return text(html.escape(words), css="moewb-label", padding="2px 8px 0 0", **sizes)


def rule() -> Any:
    """A thin line between parts."""
    return text("<hr>", width="100%")


def copyable(content: str) -> str:
    """A block of text with a copy button."""
    script = (
        "const b=this;navigator.clipboard.writeText(b.parentNode.querySelector('pre').innerText)"
        ".then(()=>{b.textContent='copied'},()=>{b.textContent='select it'})"
        ".finally(()=>setTimeout(()=>{b.textContent='copy'},1500))"
    )
    return (
        f'<div class="moewb-copy"><pre>{html.escape(content)}</pre>'
        f'<button type="button" title="copy to the clipboard" onclick="{html.escape(script)}">copy</button></div>'
    )


def show(widget: Any, wanted: bool) -> None:
    """Show a widget or take it out of the page's flow; sends nothing when it is so already."""
    display = None if wanted else "none"
    if widget.layout.display != display:
        widget.layout.display = display
