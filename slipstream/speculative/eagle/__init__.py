"""EAGLE-1 and EAGLE-2 heads."""
