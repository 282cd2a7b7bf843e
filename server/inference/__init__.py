"""A request from its admission to the end of its answer.

Begin with `admission`, then `generation`. The rooms may be asked that know money, limits, accounts,
adapters, engines and text; HTTP is unknown here, and so are the shapes of OpenAI's API. It owns the
idempotency keys in the database, and in memory what is known of requests under way.
"""
