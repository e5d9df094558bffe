"""The data types that all rooms share: config, requests, outputs. Standard library only."""
