"""How time is measured, and against whom."""
