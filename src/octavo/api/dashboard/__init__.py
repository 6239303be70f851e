"""The page at /: its files, and the feed that it draws the cache from."""
