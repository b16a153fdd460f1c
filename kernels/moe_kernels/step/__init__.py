"""What stands between the matrix products of a decode step, one launch each: norms, rotary position, gates."""
