"""The ops of networks, sampling and batch preparation, and their backends."""
