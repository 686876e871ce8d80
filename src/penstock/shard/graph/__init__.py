"""Turn a flat program into decisions: axis groups, edges that may reshard, folded layers, live ranges and roles."""
