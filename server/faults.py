"""Faults, see `registry.errors`."""

from registry.errors import (
    Conflict as Conflict,
)
from registry.errors import (
    Damaged as Damaged,
)
from registry.errors import (
    Failed as Failed,
)
from registry.errors import (
    Fault as Fault,
)
from registry.errors import (
    Forbidden as Forbidden,
)
from registry.errors import (
    Invalid as Invalid,
)
from registry.errors import (
    Limited as Limited,
)
from registry.errors import (
    NotFound as NotFound,
)
from registry.errors import (
    Overloaded as Overloaded,
)
from registry.errors import (
    QuotaExceeded as QuotaExceeded,
)
from registry.errors import (
    TimedOut as TimedOut,
)
from registry.errors import (
    Unavailable as Unavailable,
)
