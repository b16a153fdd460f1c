"""Whole models: configuration, tensors of a checkpoint, layers and the network that runs them."""
