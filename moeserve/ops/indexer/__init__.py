"""The lightning indexer (DeepSeek-V3.2), which chooses the entries that a token attends to."""
