"""Several drafters in one step."""
