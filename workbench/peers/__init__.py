"""Backends of others, brought in by `moe_kernels.register_backend` where their packages are installed."""
