"""The exported model: its folder, card and upload; text generated with it."""
