"""/v1/responses, as a translation onto the way chats are answered."""
