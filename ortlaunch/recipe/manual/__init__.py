"""The manual and the JSON schema, generated from the fields."""
