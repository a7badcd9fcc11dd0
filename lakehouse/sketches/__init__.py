"""Sketches as the tables hold them: Apache DataSketches in their own binary form, read and merged without Spark."""
