"""The legal moves of batches on disk, and the daemon's picture of where they lie."""
