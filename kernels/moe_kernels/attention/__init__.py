"""Attention over a paged cache: decode for grouped queries and latent heads, and prefill."""
