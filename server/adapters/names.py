"""Resolves `model` for a tenant: its own adapter, or an adapter shared with it."""

from dataclasses import dataclass

from sqlalchemy.engine import Connection

from registry.catalog import grants
from registry.catalog.catalog import Catalog
from registry.catalog.names import model_not_found, parse_model
from registry.errors import NotFound
from registry.ref import AdapterRef, BaseRef
from server.accounts import tenants
from server.accounts.auth import Identity


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter version; every tenant that may use it can name the adapter `owner_name/name`.

    base: the base model which it is for.
    response_template: the format of its tool calls as JSON; None for the base model's.
    tokenizer: what `registry.formats.own_tokenizer` found, as JSON; None for nothing.
    """

    owner_id: str
    owner_name: str
    name: str
    ref: AdapterRef
    base: BaseRef
    response_template: str | None = None
    tokenizer: str | None = None


def resolve_adapter(
    conn: Connection, catalog: Catalog, identity: Identity, model: str, *, request_key: str
) -> NamedAdapter:
    """Return the version that `model` means to this tenant now; it is for a served base model.

    model: no base model's name, which the caller compares first and in full: it may contain a
    slash, like owner/name.   request_key chooses between the versions of a weighted alias.
    Raises NotFound; a missing owner, a missing adapter and a missing grant give the same
    error.
    """
    owner_id, (owner_name, slash, rest) = identity.tenant_id, model.partition("/")
    if not slash:
        owner_name, rest = identity.tenant_name, model
    try:
        name = parse_model(rest).name
        if slash:
            owner_id = _owner(conn, identity, owner_name, name)
        version = catalog.resolve(conn, owner_id, rest, request_key)
    except NotFound:
        if not slash:
            raise
        # The original message would tell the caller whether the adapter or only the version exists.
        raise model_not_found(model) from None
    return NamedAdapter(
        owner_id,
        owner_name,
        name,
        version.ref,
        version.base,
        version.response_template,
        version.tokenizer,
    )


def _owner(conn: Connection, identity: Identity, owner_name: str, name: str) -> str:
    """Return the id of the tenant named `owner_name` if the caller may use its adapter `name`.

    Raises NotFound.
    """
    owner_id = tenants.find_id(conn, owner_name) or ""
    if owner_id == identity.tenant_id:
        return identity.tenant_id
    # An owner that does not exist is asked about as well, so that the time tells nothing.
    if not grants.is_granted(conn, owner_id, name, identity.tenant_id):
        raise model_not_found(f"{owner_name}/{name}")
    return owner_id
