"""Text as bytes: corpora, their download, the windows of a batch."""
