"""Block bookkeeping (pure Python) and the storage that the blocks name."""
