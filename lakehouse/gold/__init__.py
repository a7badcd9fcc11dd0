"""Product tables: current rows, merged and committed without a JVM."""
