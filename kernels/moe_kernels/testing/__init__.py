"""Oracles, error budgets and offline compilation, for tests of these kernels and of backends registered beside them."""
