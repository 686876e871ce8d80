"""Show a plan to a reader.

In: a `PlanRecord`. Out: text for the terminal (`text.py`), or an HTML page with drawings of the layouts (`html.py`).
"""
