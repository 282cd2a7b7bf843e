"""What can go wrong on an adapter's way to the arena.

LoraError
├── ArenaFull         not now: everything left is in use
└── AdapterRejected   this object will never work: corrupt, or not of this base model
"""


class LoraError(Exception):
    """The base of the tree."""


class ArenaFull(LoraError):
    """Fewer slabs are free than were asked for; nothing was allocated."""

    def __init__(self, wanted: int, free: int) -> None:
        self.wanted, self.free = wanted, free
        super().__init__(f"{wanted} slabs wanted, {free} free")


class AdapterRejected(LoraError):
    """The object was had and cannot be used."""
