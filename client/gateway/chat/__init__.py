"""`/v1/chat/completions`, and what the other routes of chats share with it."""
