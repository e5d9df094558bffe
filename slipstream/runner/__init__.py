"""Lays out batches as flat tensors and runs forward passes."""
