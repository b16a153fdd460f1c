"""How a layer is run: eager, compiled, in a CUDA graph."""
