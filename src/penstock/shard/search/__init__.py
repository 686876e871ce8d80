"""Choose the decisions: the cost of an assignment, the exact step per mesh axis, and the search within the memory limit."""
