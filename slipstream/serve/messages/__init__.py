"""The Messages protocol: requests are translated to chat requests, and answers back."""
