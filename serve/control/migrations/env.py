"""Runs the steps on the connection that :meth:`serve.control.store.ControlStore.migrate` opened."""

from alembic import context

from serve.control.tables import ControlBase

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=ControlBase.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
