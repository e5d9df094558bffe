"""The step, the scheduler, the engine and its offline front."""
