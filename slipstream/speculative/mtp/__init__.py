"""Multi-token prediction modules, mostly stored beside the target."""
