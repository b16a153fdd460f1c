"""Results as text and pages for people: tables, a Markdown summary, a page that opens offline."""

from workbench.report.page import page
from workbench.report.summary import summary
from workbench.report.table import Table, failures, results_table

__all__ = ["Table", "failures", "page", "results_table", "summary"]
