"""Reports: medians over rounds as tables, JSON, HTML and plots, and differences of two runs."""
