"""The C++ kernels for CPUs. The only place that imports `_slipstream_cpu`."""
