"""Routed rows sorted by expert and padded to whole blocks."""
