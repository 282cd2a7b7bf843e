"""Token ids in, token ids out: scheduling, the model, the journal of what was generated.

It may touch the device, its own journal and its socket: no HTTP, no SQL, no money, no text. The
scheduler owns every request, the runner every tensor, the journal every count.
"""
