"""Show a plan to a reader: as text in the terminal (`text.py`), or as an HTML page with drawings of the layouts (`page.py`)."""
