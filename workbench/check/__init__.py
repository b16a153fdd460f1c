"""Is it right, and in which part is it not."""
