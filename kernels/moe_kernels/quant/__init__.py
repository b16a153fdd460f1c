"""Quantisation of weights, packing of four-bit values, and quantisation of activations."""
