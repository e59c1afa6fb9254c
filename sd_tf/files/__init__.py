"""Files: written atomically, locked, published, and read row by row."""
