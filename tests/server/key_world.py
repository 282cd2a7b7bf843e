"""Keys of one tenant that make, change, rotate and revoke each other."""

from server.accounts.auth import InvalidApiKey, digest, identify, parse_key
from server.accounts.keys import change_key, create_key, get_key, revoke_key, rotate_key
from server.billing.budgets import HAS_HARD_BUDGET
from tests.server.factories import NOW_MS, PEPPER, make_tenant


class World:
    """Keys of one tenant, each known by its plaintext."""

    def __init__(self, database, name="acme"):
        self.database = database
        self.tenant_id = make_tenant(database, name).tenant_id
        self.now_ms = NOW_MS

    def identity(self, plaintext):
        key = parse_key(plaintext), digest(PEPPER, plaintext)
        return self.database.read_sync(lambda c: identify(c, *key, self.now_ms, HAS_HARD_BUDGET))

    def do(self, change, *args, by=None, **options):
        asker = self.identity(by) if isinstance(by, str) else by
        return self.database.write_sync(
            lambda c: change(c, self.tenant_id, *args, now_ms=self.now_ms, by=asker, **options)
        )

    def make(self, by=None, **options):
        return self.do(create_key, "a key", PEPPER, by=by, **options)[1]

    def change(self, plaintext, by=None, **changes):
        return self.do(change_key, id_of(plaintext), changes, by=by)

    def rotate(self, plaintext, by=None, overlap_s=60, **options):
        key_id = id_of(plaintext)
        return self.do(rotate_key, key_id, PEPPER, by=by, overlap_s=overlap_s, **options)[1]

    def revoke(self, plaintext, by=None, **options):
        return self.do(revoke_key, id_of(plaintext), by=by, **options)

    def good(self, *plaintexts):
        """The keys that are accepted."""
        return [plaintext for plaintext in plaintexts if self.is_good(plaintext)]

    def key(self, plaintext):
        key_id = id_of(plaintext)
        return self.database.read_sync(lambda c: get_key(c, self.tenant_id, key_id))

    def is_good(self, plaintext):
        try:
            return bool(self.identity(plaintext))
        except InvalidApiKey:
            return False


def id_of(plaintext):
    return plaintext.split("-")[2]
