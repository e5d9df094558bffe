"""Several replicas of the server on Ray Serve, at one address."""
