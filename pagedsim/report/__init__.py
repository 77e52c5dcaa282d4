"""Reports: console tables, plots, HTML pages and timelines of recorded runs."""
