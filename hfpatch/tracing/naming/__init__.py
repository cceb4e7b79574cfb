"""Names the operation that made a bad value, the module whose code ran it, and why."""
