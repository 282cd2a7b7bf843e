"""Read and write scopes, makers of keys, limits of keys and adapters, budgets, webhooks, replay.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_NEW = (
    "webhook_events",
    "webhooks",
    "idempotency_keys",
    "limiter_epochs",
    "gateways",
    "adapter_limits",
    "budgets",
    "monthly_spend",
)
_KEY_COLUMNS = ("created_by", "replaces")
_KEY_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")
_IS_CANCELLED = sa.text("state = 'open' AND cancelled_at_ms IS NOT NULL")


def upgrade() -> None:
    for name in _KEY_COLUMNS:
        op.add_column("api_keys", sa.Column(name, sa.String(length=32)))
    for name in _KEY_LIMITS:
        op.add_column("api_keys", sa.Column(name, sa.Integer()))
    op.add_column("tenants", sa.Column("max_queue_share", sa.Float()))
    op.add_column("audit_log", sa.Column("tenant_id", sa.String(length=64)))
    op.create_index("ix_audit_log_tenant_id", "audit_log", ["tenant_id", "audit_id"])
    op.add_column("holds", sa.Column("cancelled_at_ms", sa.BigInteger()))
    op.create_index(
        "ix_holds_cancelled",
        "holds",
        ["cancelled_at_ms"],
        sqlite_where=_IS_CANCELLED,
        postgresql_where=_IS_CANCELLED,
    )
    _create_budgets()
    _create_limits()
    _create_answers()


def downgrade() -> None:
    op.drop_index("ix_audit_log_tenant_id", "audit_log")
    op.drop_column("audit_log", "tenant_id")
    for name in _NEW:
        op.drop_table(name)
    op.drop_index("ix_holds_cancelled", "holds")
    op.drop_column("holds", "cancelled_at_ms")
    op.drop_column("tenants", "max_queue_share")
    for name in (*_KEY_COLUMNS, *_KEY_LIMITS):
        op.drop_column("api_keys", name)


def _create_budgets() -> None:
    op.create_table(
        "monthly_spend",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("month", sa.String(length=7), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "month", name=op.f("pk_monthly_spend")),
    )
    op.create_table(
        "budgets",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("enforcement", sa.String(length=4), nullable=False),
        sa.Column("amount_nanousd", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('monthly', 'prepaid')", name=op.f("ck_budgets_kind")),
        sa.CheckConstraint("enforcement IN ('hard', 'soft')", name=op.f("ck_budgets_enforcement")),
        sa.CheckConstraint("amount_nanousd >= 0", name=op.f("ck_budgets_not_negative")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_budgets_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", "kind", "enforcement", name=op.f("pk_budgets")),
    )


def _create_limits() -> None:
    op.create_table(
        "adapter_limits",
        sa.Column("adapter_id", sa.String(length=64), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        *(sa.Column(name, sa.Integer()) for name in _KEY_LIMITS),
        sa.PrimaryKeyConstraint("adapter_id", name=op.f("pk_adapter_limits")),
    )
    op.create_table(
        "gateways",
        sa.Column("gateway_id", sa.String(length=64), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("gateway_id", name=op.f("pk_gateways")),
    )
    op.create_table(
        "limiter_epochs",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("num_gateways", sa.Integer(), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("mode IN ('redis', 'local')", name=op.f("ck_limiter_epochs_mode")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_limiter_epochs")),
    )


def _create_answers() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("body_sha256", sa.String(length=64), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", sa.Text()),
        sa.Column("body", sa.LargeBinary()),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "endpoint", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(
        op.f("ix_idempotency_keys_expires_at_ms"), "idempotency_keys", ["expires_at_ms"]
    )
    op.create_table(
        "webhooks",
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("webhook_id", sa.String(length=32), nullable=False),
        sa.Column("url", sa.String(length=2048), nullable=False),
        sa.Column("is_enabled", sa.Boolean(), server_default=sa.true(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.tenant_id"], name=op.f("fk_webhooks_tenant_id_tenants")
        ),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "webhook_events",
        sa.Column("event_id", sa.String(length=40), nullable=False),
        sa.Column("tenant_id", sa.String(length=64), nullable=False),
        sa.Column("type", sa.String(length=64), nullable=False),
        sa.Column("subject", sa.String(length=128), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("next_at_ms", sa.BigInteger()),
        sa.Column("delivered_at_ms", sa.BigInteger()),
        sa.Column("error", sa.Text()),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_webhook_events")),
    )
    op.create_index(
        "uq_webhook_events_subject",
        "webhook_events",
        ["tenant_id", "type", "subject"],
        unique=True,
    )
    op.create_index("ix_webhook_events_next", "webhook_events", ["next_at_ms"])
