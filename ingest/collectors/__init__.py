"""Collectors, one kind of upstream a module."""
