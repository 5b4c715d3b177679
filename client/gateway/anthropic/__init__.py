"""Anthropic's `/v1/messages`: conversations of blocks, onto chats and back."""
