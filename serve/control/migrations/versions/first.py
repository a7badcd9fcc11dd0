"""The first form of the database: that of the models, until a release fixes it. Later steps are modules beside it."""

from alembic import op

from serve.control.store import ControlBase

revision = "0001"
down_revision = None

_APPEND_ONLY = "the audit log is append-only"


def upgrade() -> None:
    ControlBase.metadata.create_all(op.get_bind())
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
