"""`doxa report`: a posterior as one self-contained HTML file, without script, readable offline."""

from doxa.app.report.report import render, save, write
from doxa.app.report.subject import Subject

__all__ = ["Subject", "render", "save", "write"]
