"""Alembic runs the steps here, on the connection of :class:`serve.control.store.ControlStore`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
