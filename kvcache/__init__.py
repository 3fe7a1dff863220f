"""The KV cache: blocks, the bytes in them, and the ledger of the three memory buckets."""
