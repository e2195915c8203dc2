"""A run as one HTML file: pictures that play, charts, checks and tables."""

from foveate.report.page import ClipPanel, ReportData, Speed, render, write_report

__all__ = ["ClipPanel", "ReportData", "Speed", "render", "write_report"]
