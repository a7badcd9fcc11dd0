"""Alembic's environment of the control plane's database."""
