"""Where one point runs."""
