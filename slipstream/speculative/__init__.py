"""Drafters: the protocol, one file per method, the catalogue."""
