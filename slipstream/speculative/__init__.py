"""Drafters: the protocol, one folder per method, the catalogue."""
