"""What ORTModule 1.19.2 needs to be right on today's torch."""
