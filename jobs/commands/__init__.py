"""Commands of ``millrace``, one module a group; :mod:`jobs.cli` puts them together."""
