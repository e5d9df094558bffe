"""/v1/responses: requests are translated to chat requests, and answers back."""
