"""Device state, layout of rows, forward passes, CUDA graphs, memory and collectives."""
