"""The report of a prefix benchmark: one HTML file that needs nothing else, readable in light and dark."""
