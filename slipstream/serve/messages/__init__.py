"""The Messages protocol, translated to chats and their answers back."""
