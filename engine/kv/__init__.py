"""The KV of requests: blocks in the arena, found by hash, swapped to host memory."""
