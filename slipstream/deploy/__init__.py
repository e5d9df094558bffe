"""Several replicas of the server on Ray Serve, behind one address."""
