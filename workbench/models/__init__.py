"""Model shapes (torch-free), layers and checkpoints: what a run computes on."""
