"""Searching tile configurations: candidates, measurement, and the files that keep the fastest."""
