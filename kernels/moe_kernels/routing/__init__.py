"""From router logits to the experts of each token."""
