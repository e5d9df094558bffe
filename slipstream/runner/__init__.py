"""From a batch to flat tensors and one forward pass."""
