"""What ORTModule 1.19.2 needs to be right on today's torch."""

import time

# Before a user's model is imported: a source file that is newer may not be what runs (export_key.py).
IMPORTED = time.time()
