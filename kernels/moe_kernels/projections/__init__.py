"""Dense linear layers in every weight format."""
