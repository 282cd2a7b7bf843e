"""A request from its admission to the end of its answer.

Begin with `admission`, then `generation`; `ticket` has what both know of a request. This room may
use the rooms that know money, limits, accounts, adapters, engines and text; it knows nothing of
HTTP and of the formats of OpenAI's API. It owns the idempotency keys in the database and, in
memory, what is known of requests under way.
"""
