"""Types of request and response bodies."""
