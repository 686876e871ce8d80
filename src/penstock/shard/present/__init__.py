"""Show a plan to a reader: as text for the terminal, and as an HTML page with drawings."""
