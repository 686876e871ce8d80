"""What the sharding planner is measured on, and how."""
