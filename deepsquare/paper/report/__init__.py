"""From rows to a page: tables and figures of the paper beside what was found here, with a verdict on each claim."""

from deepsquare.paper.report.page import render

__all__ = ["render"]
