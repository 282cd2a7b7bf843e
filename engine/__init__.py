"""The engine: token ids in, token ids out. It has the scheduler, the model and the journal.

The engine touches the device, its own journal and its socket: no HTTP, no SQL, no money, no text.
The scheduler owns every request, the runner every tensor, the journal every count.
"""
