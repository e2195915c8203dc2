"""A run as one HTML file: pictures that play, charts, checks and tables."""

from foveate.report.page import Chart, ClipPanel, Grid, ReportData, Speed, render, write_report

__all__ = ["Chart", "ClipPanel", "Grid", "ReportData", "Speed", "render", "write_report"]
