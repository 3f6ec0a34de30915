"""The HTML report: pages, charts, tables."""
