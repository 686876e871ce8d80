"""The graph room: the decisions of a plan and the arrays between them, with axis groups, folding, live ranges and roles."""
