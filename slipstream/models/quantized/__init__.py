"""Checkpoints whose matrices are stored in fewer bits: one file a format, all named in
`catalogue.py`."""
