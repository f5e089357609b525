"""One page from the rows: the tables and figures of the paper with our results and a verdict on each claim."""

from deepsquare.paper.report.page import render

__all__ = ["render"]
