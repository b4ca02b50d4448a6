"""Chats and prompts: their rows, the text that a template writes, and the passages that count."""
