"""A grammar as the engine takes it, and what it leaves out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grammar:
    """A demand in the engine's form.   not_enforced: paths of parts that the form leaves out."""

    text: str
    not_enforced: tuple[str, ...] = ()
