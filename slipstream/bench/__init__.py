"""Measuring an engine on a workload: what is run, how often, and how it is reported."""
