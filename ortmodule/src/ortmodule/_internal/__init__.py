"""Everything behind the face: may change with any release."""
