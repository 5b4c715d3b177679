"""Anthropic's `/v1/messages`, translated to chats of OpenAI's form and back."""
