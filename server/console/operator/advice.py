"""Advice for each kind of incident and each check of the audit: one sentence of what to do."""

_KEEP = "Change nothing by hand, keep the ledger and the journals, and ask"

INCIDENTS = {
    "journal_lost": "The volume of this engine was replaced or restored: bring the old one back, "
    "or, if it is gone for good, void the engine's expired holds.",
    "journal_conflict": "The journal says something else than what was posted from it, as after "
    f"its files were restored or edited: the posted record counts. {_KEEP}.",
    "ended_twice": "Two records end this request: the first was charged and the second was not, so "
    "only look whether the engines share a journal or an id.",
    "end_without_hold": "The request was posted without a charge, since no gateway had reserved "
    "for it: see whether the database was restored to an older state.",
    "hold_voided": "The journal turned up after the hold was voided, and the request was charged: "
    "take the charge back if the tenant was told that it is free.",
    "engine_differs": "The engine that ended the request is not the one in the hold, as when the "
    "request moved and the first one had it after all: it was charged once; ask if it is frequent.",
    "tenant_differs": f"The engine names another tenant than the hold. {_KEEP}.",
    "adapter_differs": "The answer is of another adapter version than was asked for: compare both "
    "digests, and take the charge back if the wrong version answered.",
    "counts_differ": "The record's counts cannot be priced, so nobody was charged: look at the "
    "engine's log of that time, and ask.",
    "amount_over_hold": "More was charged than was reserved, so a budget may be exceeded by the "
    "difference: take it back if the budget is hard.",
}

CHECKS = {
    "journals": "Ends are missing, as after a restore of the ledger: acknowledge what nobody can "
    "mend, once the gateways have settled what is still in the journals.",
    "entry ids": f"Entries were deleted, or the database was restored in part. {_KEEP}.",
    "accounts": f"A balance is not the sum of its entries. {_KEEP}.",
    "months": f"A month's charges are not the sum of its entries, so budgets err by it. {_KEEP}.",
    "roll-ups": f"An hour's sums are not those of its entries, so pages of usage err. {_KEEP}.",
    "days": f"A day's sums are not those of its entries, so pages of usage err. {_KEEP}.",
    "statements": f"An issued statement is not the sum of its entries. {_KEEP}; issue no other.",
    "open holds": "Bring back the machine that has the engine's journal, or, if its volume is gone "
    "for good, void the engine's expired holds.",
}

OTHER = f"`chorale audit` names the rows. {_KEEP}."


def advice_on(kind: str) -> str:
    """Say what to do about an incident of this kind; `audit_` and a check's name is one, too."""
    if kind.startswith("audit_"):
        return CHECKS.get(kind.removeprefix("audit_"), OTHER)
    return INCIDENTS.get(kind, OTHER)
