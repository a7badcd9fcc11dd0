"""Tests of ``serve.control``."""
