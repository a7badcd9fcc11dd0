"""The first form of the database.

Revision ID: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_APPEND_ONLY = "the audit log is append-only"


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("who", sa.String(length=200), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("act", sa.String(length=32), nullable=False),
        sa.Column("subject", sa.String(length=200), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant", "audit", ["tenant"])
    op.create_table(
        "gone",
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=127), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "name", name="pk_gone"),
    )
    op.create_index("ix_gone_revision", "gone", ["revision"])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("app", sa.String(length=63), nullable=False),
        sa.Column("actions", sa.JSON(), nullable=False),
        sa.Column("tables", sa.JSON(), nullable=False),
        sa.Column("rows", sa.JSON(), nullable=False),
        sa.Column("sources", sa.JSON(), nullable=False),
        sa.Column("rate", sa.Integer(), nullable=False),
        sa.Column("connections", sa.Integer(), nullable=False),
        sa.Column("max_event_bytes", sa.Integer(), nullable=False),
        sa.Column("until", sa.BigInteger(), nullable=True),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_index("ix_keys_owner", "keys", ["tenant", "app"])
    op.create_index("ix_keys_revision", "keys", ["revision"])
    op.create_index("ix_keys_until", "keys", ["until"])
    op.create_table(
        "revision",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_revision"),
    )
    op.create_table(
        "sources",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("declaration", sa.JSON(), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_sources"),
    )
    op.create_index("ix_sources_revision", "sources", ["revision"])
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_index("ix_tenants_revision", "tenants", ["revision"])
    op.create_table(
        "apps",
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("ends", sa.BigInteger(), nullable=True),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_apps_tenants"),
        sa.PrimaryKeyConstraint("tenant", "name", name="pk_apps"),
    )
    op.create_index("ix_apps_revision", "apps", ["revision"])
    op.create_table(
        "subscriptions",
        sa.Column("id", sa.String(length=63), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("app", sa.String(length=63), nullable=False),
        sa.Column("table", sa.String(length=63), nullable=False),
        sa.Column("where", sa.String(), nullable=False),
        sa.Column("columns", sa.JSON(), nullable=False),
        sa.Column("key", sa.String(length=63), nullable=False),
        sa.Column("created", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["tenant", "app"], ["apps.tenant", "apps.name"], name="fk_subscriptions_apps"),
        sa.PrimaryKeyConstraint("id", name="pk_subscriptions"),
    )
    op.create_index("ix_subscriptions_key", "subscriptions", ["key"])
    op.create_index("ix_subscriptions_owner", "subscriptions", ["tenant", "app"])
    op.execute("INSERT INTO revision (id, revision) VALUES (1, 0)")
    if op.get_bind().dialect.name == "sqlite":
        for act in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_{act.lower()} BEFORE {act} ON audit"
                f" BEGIN SELECT RAISE(ABORT, '{_APPEND_ONLY}'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION audit_append_only() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION '{_APPEND_ONLY}'; END $$"
    )
    op.execute(
        "CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit"
        " FOR EACH STATEMENT EXECUTE FUNCTION audit_append_only()"
    )
