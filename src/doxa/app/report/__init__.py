"""`doxa report`: a report of a posterior as one HTML file, without scripts, readable offline."""

from doxa.app.report.report import render, save, write
from doxa.app.report.subject import Subject

__all__ = ["Subject", "render", "save", "write"]
